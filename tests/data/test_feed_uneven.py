"""Ranks whose data loaders have different numbers of batches: they end together."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from eventloop import Task
from eventloop_testing import isolated_trainer, run_ranks
from eventloop_testing.ranks import RankError

X = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
Y = X.argmax(1)


def lengths(tmp_path, loader_of, uneven="pad"):
    """Trains one epoch on a loader that depends on the rank; gives the clock and the weights."""

    def run():
        rank = int(os.environ["RANK"])
        task = Task(
            model=lambda: nn.Linear(3, 3),
            loss=cross_entropy,
            train_dataloader=lambda: loader_of(rank),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        )
        with isolated_trainer(tmp_path, task, uneven=uneven) as trainer:
            trainer.fit()
            return trainer.state.clock.moment(), trainer.state.model.weight.clone()

    return run_ranks(run, timeout_s=30)


class Stream(IterableDataset):
    def __init__(self, num_batches):
        self.num_batches = num_batches

    def __iter__(self):
        return iter([(X[:4], Y[:4])] * self.num_batches)


def streams(rank):
    return DataLoader(Stream(2 + rank), batch_size=None)


class Knows:
    """A sampler that splits by rank itself, unevenly."""

    num_replicas = 2

    def __init__(self, rank):
        self.rank = rank

    def __iter__(self):
        return iter(range(8 + 4 * self.rank))

    def __len__(self):
        return 8 + 4 * self.rank


def sized(rank):
    return DataLoader(TensorDataset(X, Y), 4, sampler=Knows(rank))


@pytest.mark.parametrize("loader_of", [streams, sized])
@pytest.mark.parametrize(("uneven", "batches", "samples"), [("pad", 3, 20), ("drop", 2, 16)])
def test_uneven_numbers_of_batches_end_together(tmp_path, loader_of, uneven, batches, samples):
    """A rank that has run out waits with a batch that counts for nothing, or nobody goes on."""
    (one, weights), (other, same) = lengths(tmp_path, loader_of, uneven)

    assert one == other
    assert (one.epoch, one.batch, one.sample) == (1, batches, samples)
    assert torch.equal(weights, same)


@pytest.mark.parametrize("loader_of", [streams, sized])
def test_uneven_numbers_of_batches_may_be_an_error(tmp_path, loader_of):
    """Rather than a run that waits for ever."""
    with pytest.raises(RankError, match=r"TaskError[\s\S]*set uneven to pad"):
        lengths(tmp_path, loader_of, "error")
