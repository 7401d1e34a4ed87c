"""Streams whose state suits any number of ranks: from 2 to 1 to 4 in mid-epoch, each sample once."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from eventloop import Task, TaskError, hookimpl
from eventloop_streaming import Batches, Mixed, Permuted, Shards, Shuffled, Sliced
from eventloop_testing import isolated_trainer, run_ranks

NUM, GLOBAL_BATCH = 96, 8


class Seen:
    """An algorithm that keeps the samples of each step, and ends at a batch."""

    name = "seen"
    free_options = ("ends",)

    def __init__(self, ends):
        self.ends, self.steps = ends, []

    @hookimpl
    def batch_start(self, state):
        if state.clock.batch == self.ends:
            raise EOFError

    @hookimpl
    def after_train_batch(self, state):
        self.steps.append(state.batch.flatten().tolist())


def sliced():
    return Sliced(range(NUM))


def of_a_shuffled_mixture():
    parts = {"a": range(60), "b": range(60, NUM)}
    return Sliced(Shuffled(Mixed(parts, {"a": 0.7, "b": 0.3}, stop="all"), 16))


def permuted(batch_size):
    return DataLoader(range(NUM), batch_size, sampler=Permuted(NUM, seed=1))


def in_batches(make):
    return lambda batch_size: Batches(make(), batch_size)


KINDS = {
    "sliced": in_batches(sliced),
    "shuffled mixture": in_batches(of_a_shuffled_mixture),
    "permuted": permuted,
}


def fit(folder, make, ends):
    """Trains an epoch on global batches of 8; returns the samples of each step of this rank."""
    size = GLOBAL_BATCH // int(os.environ.get("WORLD_SIZE", "1"))
    task = Task(
        model=lambda: nn.Linear(1, 1),
        train_dataloader=lambda: make(size),
        forward=lambda model, batch: {"loss": model(batch.float().view(-1, 1)).mean()},
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-6),
    )
    seen = Seen(ends)
    given = {"max_duration": "1ep", "checkpoint_interval": "1ba"}
    try:
        with isolated_trainer(folder, task, algorithms=[seen], **given) as trainer:
            trainer.fit()
    except EOFError:
        pass
    return seen.steps


def steps_of(ranks):
    """Returns the samples of each step of all ranks together."""
    return [sorted(itertools.chain(*step)) for step in zip(*ranks, strict=True)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_each_sample_comes_once_with_other_ranks(tmp_path, kind):
    """A machine less, and then two more; each step has the samples that it would have had."""
    make = KINDS[kind]
    whole = steps_of(run_ranks(fit, tmp_path / "whole", make, None))

    steps = steps_of(run_ranks(fit, tmp_path / "run", make, 4))
    steps += steps_of([fit(tmp_path / "run", make, 7)])
    steps += steps_of(run_ranks(fit, tmp_path / "run", make, None, world_size=4))

    assert sorted(itertools.chain(*steps)) == [*range(NUM)]
    assert steps == whole


@pytest.mark.parametrize(
    "make",
    [
        lambda: Shards(range(8), lambda shard: range(12 * shard, 12 * shard + 12)),
        lambda: Shuffled(Sliced(range(NUM)), 4),
    ],
)
def test_ranks_that_hold_something_of_their_own_are_refused(tmp_path, make):
    """What a rank alone had read, or held back, would be lost."""
    run_ranks(fit, tmp_path, in_batches(make), 4)

    with pytest.raises(TaskError, match=r"stopped in mid-epoch with 2 ranks"):
        fit(tmp_path, in_batches(make), None)
