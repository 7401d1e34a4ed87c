"""Ranks that share their samples: they train what one process would, and count each sample once."""

from __future__ import annotations

import random
import re

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric

from eventloop import Task, hookimpl
from eventloop.mesh import Layout
from eventloop.schedules import cosine
from eventloop_testing import isolated_trainer, run_ranks
from eventloop_testing.ranks import RankError

X = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
Y = X.argmax(1)


class Twins:
    """Has ranks share their samples, two by two; each computes with the whole model."""

    free_options = ("size",)

    def __init__(self, size=2):
        self.size = size

    @hookimpl(wrapper=True)
    def build_mesh(self, state):
        return (yield).sharing("twin", self.size)


class Watches:
    """Keeps what the ranks have seen."""

    def __init__(self):
        self.draws = []
        self.rates = []
        self.samples = []
        self.logged = set()

    @hookimpl
    def log(self, state, numbers, at):
        self.logged |= {(numbers["mean"], numbers["sum"])} if "sum" in numbers else set()

    @hookimpl
    def batch_end(self, state):
        alike, own = state.generator("noise", alike=True), state.generator("noise")
        drawn = (torch.rand(1), torch.rand(1, generator=own), torch.rand(1, generator=alike))
        self.draws.append([*(one.item() for one in drawn), random.random()])
        self.rates.append(state.optimizers["adamw"].param_groups[0]["lr"])

    @hookimpl
    def after_train_batch(self, state):
        state.log("mean", float(state.data_rank), reduce="mean")
        state.log("sum", 1.0, reduce="sum")
        self.samples += state.batch[0][:, 0].tolist()


class Counted(SumMetric):
    """Counts the samples of an evaluation."""

    def update(self, predicted, targets):
        super().update(torch.ones(len(targets)))


class Stream:
    """Batches of a rank's samples; its state suits only as many ranks."""

    def __init__(self, state, batch_size):
        rank, num = state.data_rank, state.data_world_size
        self.batches = [*zip(X[rank::num].split(batch_size), Y[rank::num].split(batch_size))]
        self.position = 0

    def __iter__(self):
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def net(normed=False):
    first = [nn.Linear(3, 8, bias=not normed), *[nn.BatchNorm1d(8)] * normed]
    return nn.Sequential(*first, nn.ReLU(), nn.Linear(8, 3))


def train(
    folder, size=0, until=None, batch_size=12, plugins=(), stream=False, normed=False, **settings
):
    """Trains three epochs; returns weights, results and what was seen."""

    def loader(state):
        return Stream(state, batch_size) if stream else DataLoader(TensorDataset(X, Y), batch_size)

    watches = Watches()
    task = Task(
        model=lambda: net(normed),
        loss=cross_entropy,
        train_dataloader=loader,
        eval_dataloaders=lambda: DataLoader(TensorDataset(X[:7], Y[:7]), 2),
        metrics=lambda: {"num": Counted()},
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        scheduler=cosine(),
        num_tokens=lambda batch: 3 * len(batch[1]),
    )
    sharing = [Twins(size)] if size else []
    given = {"max_duration": "144sp", "clip_norm": 0.05, "checkpoint_interval": "1ba"} | settings
    with isolated_trainer(
        folder, task, algorithms=[*sharing, watches, *plugins], **given
    ) as trainer:
        state = trainer.state
        mesh = state.mesh  # before training: its groups connect while other ranks still run
        result = trainer.fit(until=until)
        return {
            "weights": {name: one.clone() for name, one in state.model.state_dict().items()},
            "metrics": result.metrics,
            "moment": state.clock.moment()._replace(seconds=0),
            "place": (state.data_rank, state.data_world_size, state.layout.label(state.rank)),
            "mesh": None if mesh is None else mesh.mesh_dim_names,
            **vars(watches),
        }


def assert_near(actual, expected, tolerance=1e-6):
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=tolerance)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_ranks_that_share_samples_train_what_one_process_would(tmp_path, microbatch_size):
    expected = train(tmp_path / "one", microbatch_size=microbatch_size)

    ranks = run_ranks(
        train, tmp_path / "ranks", 2, batch_size=6, microbatch_size=microbatch_size, world_size=4
    )

    assert [one["place"] for one in ranks] == [
        (0, 2, "0 (data 0, twin 0)"), (0, 2, "1 (data 0, twin 1)"),
        (1, 2, "2 (data 1, twin 0)"), (1, 2, "3 (data 1, twin 1)"),
    ]  # fmt: skip
    for one in ranks:
        assert_near(one["weights"], expected["weights"])
        assert one["moment"] == expected["moment"]
        assert one["rates"] == pytest.approx(expected["rates"])
        assert one["metrics"]["eval"]["num"] == 7
        assert one["metrics"]["eval"]["loss"].item() == pytest.approx(
            expected["metrics"]["eval"]["loss"].item(), abs=1e-6
        )
        assert one["mesh"] == ("data", "twin")
    assert ranks[0]["logged"] == {(0.5, 2.0)}
    assert ranks[0]["samples"] == ranks[1]["samples"] != ranks[2]["samples"]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_batch_norms_that_are_synchronised_count_each_sample_once(tmp_path, world_size):
    given = {"normed": True, "sync_batch_norm": True}
    expected = train(tmp_path / "one", normed=True)["weights"]

    size = 24 // world_size
    actual, *_ = run_ranks(train, tmp_path, 2, batch_size=size, world_size=world_size, **given)

    assert_near(actual["weights"], expected)


@pytest.mark.nightly
def test_ranks_that_share_samples_draw_alike_and_others_dont(tmp_path):
    ranks = [one["draws"] for one in run_ranks(train, tmp_path, 2, batch_size=6, world_size=4)]

    assert ranks[0] == ranks[1] != ranks[2] == ranks[3]
    assert [one[2] for one in ranks[0]] == [one[2] for one in ranks[2]]  # asked for alike


@pytest.mark.sampled(5)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("size", "world_size"), [(2, 4), (1, 2), pytest.param(2, 2, marks=pytest.mark.nightly),
                             pytest.param(1, 1, marks=pytest.mark.nightly)],
)  # fmt: skip
def test_a_run_goes_on_in_another_layout(tmp_path, size, world_size, stream):
    """Ranks go on where the one that had their samples was; in the same layout to the same bits."""
    whole = run_ranks(train, tmp_path / "whole", 2, batch_size=6, stream=stream, world_size=4)
    run_ranks(train, tmp_path / "run", 2, "6ba", batch_size=6, stream=stream, world_size=4)
    num = world_size // size
    given = {"batch_size": 12 // num, "stream": stream}

    if stream and num != 2:
        ranks = "data ranks" if size == 2 else "ranks"
        with pytest.raises(RankError, match=f"stopped in mid-epoch with 2 {ranks}"):
            run_ranks(train, tmp_path / "run", size, **given, world_size=world_size)
        return
    ranks = run_ranks(train, tmp_path / "run", size, **given, world_size=world_size)

    for one in ranks:
        is_same = (size, world_size) == (2, 4)
        assert_near(one["weights"], whole[0]["weights"], 0 if is_same else 1e-6)
        assert one["moment"] == whole[0]["moment"]
    seen = [ranks[rank * size]["samples"] for rank in range(num)]
    if num == 2:
        assert seen == [whole[0]["samples"][36:], whole[2]["samples"][36:]]
        assert ranks[0]["draws"] == whole[0]["draws"][6:]
        assert ranks[-1]["draws"] == whole[2]["draws"][6:]


class Flips:
    """Flips a bit of a weight on one rank, after the first step."""

    def __init__(self, rank):
        self.rank = rank

    @hookimpl
    def batch_end(self, state):
        if state.rank == self.rank and state.clock.batch == 1:
            weight = next(state.model.parameters()).data.view(torch.int32)
            weight[0, 0] ^= 1 << 28  # of the exponent


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [1, 2])
def test_a_flipped_bit_is_found_and_the_rank_is_named_by_its_place(tmp_path, rank):
    place = {1: r"1 \(data 0, twin 1\)", 2: r"2 \(data 1, twin 0\)"}[rank]

    with pytest.raises(RankError, match=r"have drifted apart: .0\.weight. differs since") as raised:
        run_ranks(train, tmp_path, 2, batch_size=6, plugins=[Flips(rank)], world_size=4)

    assert re.search(place, str(raised.value))


class Nonsense:
    """Arranges the ranks in a way that isn't one."""

    def __init__(self, layouts):
        self.layouts = layouts

    @hookimpl
    def build_mesh(self, state):
        return self.layouts[state.rank]()


@pytest.mark.parametrize(
    "layouts",
    [
        [lambda: {"data": 2}] * 2,
        [lambda: Layout({"data": 3})] * 2,
        [lambda: Layout({"data": 2}), lambda: Layout({"data": 1, "tp": 2})],
        [lambda: Layout({"data": 2.0})] * 2,
        [lambda: Layout({"foo": 2})] * 2,
    ],
)
def test_a_layout_that_is_none_is_refused(tmp_path, layouts):
    with pytest.raises(
        RankError, match=r"build_mesh returned|a size isn't a number, or a dimension"
    ):
        run_ranks(train, tmp_path, plugins=[Nonsense(layouts)])
