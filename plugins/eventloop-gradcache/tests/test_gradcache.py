"""A loss over pairs in microbatches: the step of the batch in one piece, on one rank and on two."""

from __future__ import annotations

import os
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, TensorDataset

from eventloop import PluginError, Task, TaskError, hookimpl
from eventloop.data import collated
from eventloop_fsdp import Fsdp
from eventloop_gradcache import GradCache, all_gather
from eventloop_testing import isolated_trainer, run_ranks
from eventloop_testing.ranks import RankError

GENERATOR = torch.Generator().manual_seed(0)
QUERIES, ANSWERS = (torch.randn(24, 5, generator=GENERATOR) for _ in range(2))


class TwoTowers(nn.Module):
    """Embeds queries and answers; a temperature is trained, too."""

    def __init__(self, dropout=0.0, form=tuple):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 4))
        self.answer = nn.Linear(5, 4)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("num_passes", torch.zeros(()))
        self._form = form

    def forward(self, queries, answers):
        self.num_passes += self.training
        outputs = normalize(self.query(queries)), normalize(self.answer(answers)), self.scale
        names = ("queries", "answers", "scale")
        return outputs if self._form is tuple else self._form(zip(names, outputs, strict=True))


def in_batch(outputs, targets=None):
    """Each query's answer among all answers of the batch, of all ranks."""
    if not isinstance(outputs, tuple):
        outputs = tuple(outputs.values())
    queries, answers, scale = outputs
    queries, answers = all_gather(queries), all_gather(answers)
    return cross_entropy(
        queries @ answers.T * scale, torch.arange(len(queries), device=queries.device)
    )


def trained(folder, *plugins, batch_size=12, dropout=0.0, form=tuple, loader=None, **settings):
    loader = loader or DataLoader(TensorDataset(QUERIES, ANSWERS), batch_size)
    task = Task(
        model=lambda: TwoTowers(dropout, form),
        forward=lambda model, batch: model(*batch),
        loss=in_batch,
        loss_splits=False,
        train_dataloader=loader,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
    )
    given = {"max_duration": "3ep", "run_dir": folder / os.environ.get("RANK", "one")} | settings
    with isolated_trainer(folder, task, algorithms=plugins, **given) as trainer:
        history = trainer.fit().history
        weights = {name: one.cpu() for name, one in trainer.state.model.state_dict().items()}
        return weights, [row["train/loss"] for row in history]


def assert_near(actual, expected, tolerance=1e-6):
    for name, one in expected.items():
        torch.testing.assert_close(actual[name], one, rtol=0, atol=tolerance)


@pytest.mark.parametrize("form", [tuple, dict, OrderedDict])
@pytest.mark.parametrize("size", [1, 5, 12])
def test_microbatches_make_the_step_of_the_batch(tmp_path, size, form):
    """Outputs without samples, as the temperature, have their gradient once."""
    expected, losses = trained(tmp_path / "whole", form=form)

    weights, found = trained(tmp_path / "cached", GradCache(microbatch_size=size), form=form)

    assert_near(weights, expected | {"num_passes": torch.tensor(6.0 * -(-12 // size))})
    assert found == pytest.approx(losses, abs=1e-6)


def test_slices_would_make_another_step(tmp_path):
    """Control: the negatives of other microbatches are missing."""
    expected, _ = trained(tmp_path / "whole", batch_size=12)

    weights, _ = trained(tmp_path / "small", batch_size=6)

    with pytest.raises(AssertionError):
        assert_near(weights, expected, 1e-3)


def test_both_passes_draw_the_same(tmp_path):
    """With dropout the outputs whose gradients are known are those that are computed again."""
    watched = []

    class Watches:
        @hookimpl
        def after_forward(self, state):
            watched.append([one.detach().clone() for one in state.outputs[:2]])

    cache = GradCache(microbatch_size=4)
    joined = []
    shares = cache._outputs_of
    cache._outputs_of = lambda *args: joined.append(shares(*args)) or joined[-1]

    trained(tmp_path, cache, Watches(), dropout=0.5, max_duration="1ep")

    first = [one for several in joined[1:] for one in several]  # the first of all was a check
    assert len(first) == len(watched) == 6
    for one, again in zip(first, watched, strict=True):
        assert all(map(torch.equal, one[:2], again))
    assert not torch.equal(watched[0][0], watched[1][0])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_reduced_precision_trains_alike(tmp_path, precision):
    """The cached gradients have the type of the outputs; fp16's losses are scaled."""
    expected, _ = trained(tmp_path / "whole", precision=precision)

    weights, _ = trained(tmp_path / "cached", GradCache(microbatch_size=4), precision=precision)

    assert_near({**weights, "num_passes": expected["num_passes"]}, expected, 2e-2)


def of_rank(folder, *plugins):
    """Trains with half of each batch."""
    rank = int(os.environ["RANK"])
    halves = TensorDataset(QUERIES.view(2, 2, 6, 5)[:, rank].flatten(0, 1),
                           ANSWERS.view(2, 2, 6, 5)[:, rank].flatten(0, 1))  # fmt: skip
    loader = [tuple(one) for one in DataLoader(halves, 6)]
    # A list is shared out by batches: each rank has its own ones twice, of which it takes one.
    loader = [one for one in loader for _ in range(2)]
    return trained(folder, *plugins, loader=loader)


@pytest.mark.parametrize("plugins", [[], [GradCache(microbatch_size=2)]])
def test_two_ranks_make_the_step_of_all_samples(tmp_path, plugins):
    """Each has the answers of the other as negatives, with gradients."""
    expected, losses = trained(tmp_path / "whole")

    ranks = run_ranks(of_rank, tmp_path, *plugins)

    for weights, found in ranks:
        assert_near({**weights, "num_passes": expected["num_passes"]}, expected)
        assert found == pytest.approx(losses, abs=1e-6)


def test_ranks_with_other_numbers_of_samples_are_told(tmp_path):
    """Rather than a collective that hangs."""

    def run():
        all_gather(torch.zeros(2 + int(os.environ["RANK"]), 3))

    def of_rank():
        task = Task(
            model=nn.Linear(3, 3),
            loss=lambda outputs, targets: all_gather(outputs).sum(),
            train_dataloader=[(torch.zeros(2, 3),) * 2, (torch.zeros(3, 3),) * 2],
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        )
        with isolated_trainer(tmp_path / os.environ["RANK"], task) as trainer:
            trainer.fit()

    with pytest.raises(RankError, match=r"shapes \(2, 3\), \(3, 3\); let the data loader drop"):
        run_ranks(of_rank)


def test_ranks_of_a_sharded_model_with_other_numbers_of_microbatches_are_told(tmp_path):
    """Each pass gathers its weights: a rank with more would wait for the others."""

    def of_rank():
        task = Task(
            model=lambda: nn.Linear(5, 4),
            loss=lambda outputs, targets: (outputs @ outputs.T).mean(),
            loss_splits=False,
            train_dataloader=[(QUERIES[:num], ANSWERS[:num]) for num in (8, 4)],
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        )
        plugins = [GradCache(microbatch_size=2), Fsdp()]
        with isolated_trainer(tmp_path / os.environ["RANK"], task, algorithms=plugins) as trainer:
            trainer.fit()

    with pytest.raises(RankError, match="the ranks have 4, 2 microbatches, but every pass"):
        run_ranks(of_rank, timeout_s=60)


def test_what_splits_already_is_refused(tmp_path):
    """With the setting, or the batch."""
    cache = GradCache(microbatch_size=4)
    with pytest.raises(PluginError, match="microbatch_size is 3, and gradcache has its own"):
        trained(tmp_path / "a", cache, microbatch_size=3)
    collate_fn = collated(lambda samples: tuple(map(torch.stack, zip(*samples, strict=True))),
                          microbatch_size=4)  # fmt: skip
    loader = DataLoader(TensorDataset(QUERIES, ANSWERS), 12, collate_fn=collate_fn)
    with pytest.raises(PluginError, match="in one piece, not Microbatches of 3"):
        trained(tmp_path / "b", cache, loader=loader)
    with pytest.raises(TaskError, match=r"can't be split[\s\S]*eventloop-gradcache"):
        trained(tmp_path / "c", microbatch_size=3)


class Shrinks:
    """Trains with a third of the batch."""

    @hookimpl
    def before_train_batch(self, state):
        state.batch = tuple(one[::3] for one in state.batch)


def test_a_batch_that_a_plugin_shrinks_has_its_own_gradient(tmp_path):
    """Its samples are counted where it is split."""
    expected, _ = trained(tmp_path / "whole", Shrinks())

    weights, _ = trained(tmp_path / "cached", Shrinks(), GradCache(microbatch_size=2))

    assert_near({**weights, "num_passes": expected["num_passes"]}, expected)


class Bad(nn.Module):
    """Returns what can't be joined."""

    def __init__(self, kind):
        super().__init__()
        self.layer, self.bias, self.kind = nn.Linear(5, 4), nn.Parameter(torch.ones(4)), kind

    def forward(self, queries, answers):
        queries, answers = self.layer(queries), self.layer(answers)
        match self.kind:
            case "square":
                return queries @ answers.T
            case "twice":
                return torch.cat([queries, answers])
            case "mean":
                return queries, answers.mean()
            case "loss":
                return {"queries": queries, "loss": queries.mean()}
            case "parameter":
                return queries, answers, self.bias


@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("square", "can't join output 1: of microbatches of"),
        ("twice", "can't join output 1: of microbatches of"),
        ("mean", r"can't join output 2: .* shapes \(\), and isn't the same"),
        ("loss", "the model computes a loss of its own"),
        ("parameter", None),
    ],
)
def test_outputs_that_can_not_be_joined_are_named(tmp_path, kind, message, size):
    """Rather than trained on another loss; a parameter may be as long as a microbatch."""

    def loss(outputs, targets):
        first = outputs if isinstance(outputs, torch.Tensor) else next(iter(outputs))
        return (first if isinstance(first, torch.Tensor) else outputs["queries"]).square().mean()

    task = Task(
        model=lambda: Bad(kind),
        forward=lambda model, batch: model(*batch),
        loss=loss,
        train_dataloader=DataLoader(TensorDataset(QUERIES, ANSWERS), 12),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    cache = GradCache(microbatch_size=size)
    with isolated_trainer(tmp_path, task, algorithms=[cache]) as trainer:
        if message is None:
            trainer.fit()
        else:
            with pytest.raises(PluginError, match=message):
                trainer.fit()


@pytest.mark.parametrize("size", [0, -1, 2.0, "4", True])
def test_a_size_without_a_meaning_is_refused(size):
    """With what was given."""
    with pytest.raises(ValueError, match="is not an int of 1 or more"):
        GradCache(microbatch_size=size)
