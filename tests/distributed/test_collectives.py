"""What ranks tell each other while they train: nothing where they know it, and nothing too late."""

from __future__ import annotations

import math
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from eventloop import Task, hookimpl
from eventloop.data.batches import Count
from eventloop.distributed import collectives
from eventloop_testing import isolated_trainer, run_ranks
from eventloop_testing.ranks import RankError

X = torch.randn(160, 3, generator=torch.Generator().manual_seed(0))
Y = X.argmax(1)
SAMPLES = TensorDataset(X, Y)


class Filters(TensorDataset):
    """Leaves samples out of a batch that it reads at once."""

    def __getitems__(self, indices):
        return [self[idx] for idx in indices if idx % 3]


def make_task(dataloader=None, **given):
    parts = {
        "model": lambda: nn.Linear(3, 3),
        "loss": cross_entropy,
        "train_dataloader": dataloader or DataLoader(SAMPLES, 2),  # 40 batches on each of two ranks
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    }
    return Task(**parts | given)


@pytest.fixture
def fit(tmp_path):
    """Trains on ranks; returns each one's batch, reason to stop, and what `look` finds."""

    def fit(task=None, plugins=list, look=lambda _: None, **settings):
        def train():
            folder = tmp_path / os.environ["RANK"]
            settings_ = {"log_interval": "100ba", **settings}
            with isolated_trainer(
                folder, task or make_task(), algorithms=plugins(), **settings_
            ) as trainer:
                trainer.fit()
                return trainer.state.clock.batch, trainer.state.stop_reason, look(trainer.state)

        return run_ranks(train)

    return fit


class Asks:
    """Has rank 1 ask at a batch."""

    name = "asks"

    def __init__(self, reason="enough", batch=2, hook="batch_end", kind="plugin"):
        self.reason, self.batch, self.hook, self.kind = reason, batch, hook, kind

    @hookimpl
    def batch_end(self, state):
        self._ask(state, "batch_end")

    @hookimpl
    def eval_end(self, state):
        self._ask(state, "eval_end")

    def _ask(self, state, hook):
        if state.rank == 1 and hook == self.hook and state.clock.batch == self.batch:
            state.request_stop(self.reason, self.kind)


class Counts:
    """Notes at which batches a collective was asked for, the gradients' apart."""

    name = "counts"

    def __init__(self):
        self.at = []

    @hookimpl
    def fit_start(self, state):
        made = dist.all_reduce

        def counted(*args, **kwargs):
            self.at.append(state.clock.batch)
            return made(*args, **kwargs)

        dist.all_reduce = counted


@pytest.fixture
def unhurried(monkeypatch):
    """Time asks for no collectives."""
    monkeypatch.setattr(collectives, "_NOTICED_S", math.inf)


@pytest.mark.parametrize("microbatch_size", [None, 1])
@pytest.mark.usefixtures("unhurried")
def test_steady_steps_have_the_collectives_of_the_gradients_alone(fit, microbatch_size):
    """Between the exchange of the first batch and that of the sixteenth, there is none."""
    counts = Counts()

    found = fit(plugins=lambda: [counts], look=lambda _: counts.at, microbatch_size=microbatch_size)

    for _, _, at in found:
        within = [one for one in at if 0 < one < 40]
        assert within == [15, 31]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("task", "plugins", "is_even"),
    [
        (make_task(), [], True),
        (make_task(DataLoader(SAMPLES, 3, shuffle=True)), [], True),
        (make_task(DataLoader(SAMPLES, 2, collate_fn=lambda one: default_collate(one))), [], False),
        (
            make_task(
                DataLoader(SAMPLES, batch_sampler=BatchSampler(SequentialSampler(X), 2, False))
            ),
            [],
            False,
        ),
        (make_task([(X[:2], Y[:2])] * 8), [], False),
        (make_task(DataLoader(Filters(X, Y), 4)), [], False),
        (make_task(DataLoader(Subset(Filters(X, Y), range(80)), 4)), [], False),
        (make_task(DataLoader(Subset(SAMPLES, range(80)), 4)), [], True),
        (make_task(num_tokens=lambda inputs: inputs.numel()), [], False),
        (make_task(loss_weight=lambda inputs: len(inputs)), [], False),
    ],
)
def test_even_batches_are_known(fit, task, plugins, is_even):
    """A collate function, a sampler of batches, or counts of the task's own may differ by rank."""
    found = fit(task, plugins=lambda: plugins, look=lambda state: state.even_batches)

    assert [one for _, _, one in found] == [is_even] * 2


def test_what_one_process_counts_is_told_to_no_rank(tmp_path):
    with isolated_trainer(tmp_path, make_task()) as trainer:
        trainer.fit()

        assert not trainer.state.even_batches


@pytest.mark.usefixtures("unhurried")
def test_a_plugin_s_request_is_granted_at_a_batch_that_no_clock_decides(fit):
    assert fit(plugins=lambda: [Asks()]) == [(16, "enough", None)] * 2


def test_a_signal_is_noticed_whatever_the_batch(fit, monkeypatch):
    """Where a batch takes long, at the next one; a plugin's request still waits for its batch."""
    monkeypatch.setattr(collectives, "_NOTICED_S", 0.0)
    signal = Asks("rank 1 received SIGTERM", kind="signal")

    found = fit(plugins=lambda: [signal], look=lambda state: state.stop_reason.kind)
    assert found == [(3, "rank 1 received SIGTERM", "signal")] * 2
    assert fit(plugins=lambda: [Asks()]) == [(16, "enough", None)] * 2


def test_a_signal_is_noticed_after_a_plugin_s_request(fit, monkeypatch):
    """The request that came first gives the reason."""
    monkeypatch.setattr(collectives, "_NOTICED_S", 0.0)
    signal = Asks("rank 1 received SIGTERM", batch=4, kind="signal")
    signal.name = "signal"

    assert fit(plugins=lambda: [Asks(), signal]) == [(5, "enough", None)] * 2


@pytest.mark.usefixtures("unhurried")
def test_words_of_a_plugin_are_no_signal(fit):
    """What became of the run is decided by the kind alone."""
    found = fit(plugins=lambda: [Asks("rank 1 received SIGTERM")])

    assert found == [(16, "rank 1 received SIGTERM", None)] * 2


@pytest.mark.usefixtures("unhurried")
def test_a_request_in_an_evaluation_is_granted_after_it(fit):
    task = make_task(eval_dataloaders=DataLoader(SAMPLES, 8))

    found = fit(task, plugins=lambda: [Asks(batch=4, hook="eval_end")], eval_interval="4ba")

    assert found == [(4, "enough", None)] * 2


@pytest.mark.usefixtures("unhurried")
def test_no_checkpoint_is_saved_while_a_request_waits(fit):
    """The run that goes on from it wouldn't ask again."""
    assert fit(plugins=lambda: [Asks()], checkpoint_interval="5ba") == [(5, "enough", None)] * 2


@pytest.mark.nightly
def test_a_duration_in_seconds_ends_on_all_ranks_at_one_batch(fit):
    (batch, *_), (other, *_) = fit(max_duration="0.4sec")

    assert batch == other > 16


class Cuts:
    """Leaves a sample out, on one rank."""

    name = "cuts"

    @hookimpl
    def after_dataloader(self, state):
        if state.rank and state.clock.batch == 5:
            state.batch = tuple(one[1:] for one in state.batch)


@pytest.mark.usefixtures("unhurried")
def test_batches_that_a_plugin_makes_uneven_are_named(fit):
    with pytest.raises(
        RankError, match=r"counted for (29|30) samples, and those of all ranks for 59: a plugin"
    ):
        fit(plugins=lambda: [Cuts()])


class CutsLast(Cuts):
    """Leaves one out in the last batch, after which no exchange comes."""

    @hookimpl
    def after_dataloader(self, state):
        if state.rank and state.clock.batch == 39:
            state.batch = tuple(one[1:] for one in state.batch)


@pytest.mark.nightly
@pytest.mark.usefixtures("unhurried")
def test_the_last_uneven_batch_is_named_before_the_fit_ends(fit):
    with pytest.raises(
        RankError, match=r"counted for (17|18) samples, and those of all ranks for 35"
    ):
        fit(plugins=lambda: [CutsLast()])


class Weighs(Cuts):
    """Does the same, and says what a batch counts for."""

    @hookimpl
    def count_batch(self, state, batch):
        return Count(len(batch[0]), 0)


def test_a_plugin_that_counts_may_make_batches_uneven(fit):
    (batch, *_), _ = fit(plugins=lambda: [Weighs()])

    assert batch == 40


def test_sparse_gradients_are_averaged_by_hand_as_by_ddp(fit):
    """Where microbatches may be run again, the exchange isn't in the backward pass."""
    data = [(torch.tensor([idx % 7, idx % 3]), idx % 3) for idx in range(16)]

    def task():
        return make_task(
            DataLoader(data, 4),
            model=lambda: nn.Sequential(
                nn.Embedding(8, 3, sparse=True), nn.Flatten(), nn.Linear(6, 3)
            ),
        )

    def look(state):
        return [param.sum().item() for param in state.model.parameters()]

    by_ddp, by_hand = (
        fit(task(), look=look, max_duration="2ba", **given)
        for given in ({}, {"microbatch_size": "auto"})
    )

    assert by_hand == by_ddp
