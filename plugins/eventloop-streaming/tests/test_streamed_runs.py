"""Trainings on streams: killed anywhere, in the process and with workers, they end with the same bits."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from eventloop import Task
from eventloop_streaming import (
    Batches,
    Mixed,
    Permuted,
    Shards,
    Shuffled,
    Sliced,
    ThreadedDataLoader,
)
from eventloop_testing import Dies, KilledRuns, isolated_trainer


def sample(number):
    """Returns inputs, shape (3,), and a target, that belong to a number."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(3, generator=generator), torch.randn(1, generator=generator)


def shards():
    return Shards(range(6), lambda shard: [sample(10 * shard + idx) for idx in range(5 + shard)])


class Numbers(Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, idx):
        return sample(idx)


def in_the_process():
    return Batches(
        Shuffled(
            Mixed({"a": shards(), "b": [sample(900 + idx) for idx in range(9)]}, stop="all"), 8
        ),
        4,
    )


def stateful():
    return StatefulDataLoader(Shuffled(shards(), 8), 4)


def workers():
    return StatefulDataLoader(Shuffled(shards(), 8), 4, num_workers=2)


def sliced():
    return Batches(Sliced(Shuffled([sample(idx) for idx in range(50)], 8)), 4)


def threads():
    return ThreadedDataLoader(Numbers(), 4, shuffle=True)


def permuted():
    return DataLoader(Numbers(), 4, sampler=Permuted(50, seed=2))


LOADERS = {
    one.__name__: one for one in (in_the_process, stateful, workers, sliced, threads, permuted)
}
# torchdata 0.11 with torch 2.13.
pytestmark = pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")


def fit(folder, batch, kind):
    """Trains two epochs."""
    task = Task(
        model=lambda: nn.Linear(3, 1),
        train_dataloader=LOADERS[kind],
        loss=mse_loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    settings = {"max_duration": "2ep", "checkpoint_interval": "1ba"}
    with isolated_trainer(folder, task, algorithms=[Dies(batch)], **settings) as trainer:
        trainer.fit()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", LOADERS)
def test_a_killed_run_ends_with_the_bits_of_one_in_one_go(tmp_path, kind):
    """Twice in the first epoch, and in the second."""
    runs = KilledRuns(fit, tmp_path / "whole", kind)

    assert runs.differing(tmp_path / "killed", 2, 6, 15) == []


@pytest.mark.nightly
def test_the_buffer_is_needed(tmp_path):
    """Control: a run whose checkpoint has lost it trains on other samples."""

    def forget(parts):
        found = [one for one in _mappings(parts) if "buffer" in one]
        assert found
        for one in found:
            one["buffer"] = []

    runs = KilledRuns(fit, tmp_path / "whole", "in_the_process")

    assert runs.differing(tmp_path / "killed", 5, forget=forget) != []


def _mappings(nest):
    if isinstance(nest, dict):
        yield nest
        for one in nest.values():
            yield from _mappings(one)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", LOADERS)
def test_twenty_kills_leave_no_trace(tmp_path, kind):
    """At any batch of both epochs, and several times at one."""
    runs = KilledRuns(fit, tmp_path / "whole", kind)
    batches = sorted(random.Random(kind).randrange(1, 22) for _ in range(20))

    assert runs.differing(tmp_path / "killed", *batches) == []
