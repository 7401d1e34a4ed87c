"""Samples that threads read: the same as in one process, in order, exact over kills, or refused."""

from __future__ import annotations

import random
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import dropout, mse_loss
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from eventloop import Task, TaskError, hookimpl
from eventloop_streaming import ThreadedDataLoader
from eventloop_testing import Dies, KilledRuns, isolated_trainer

NUM = 30


class Transform:
    """Has generators of its own, below the data set."""

    def __init__(self):
        self.rngs = [random.Random(0), torch.Generator()]

    def __call__(self, value):
        noise = torch.rand(1, generator=self.rngs[1]).item()
        return value + self.rngs[0].random() + noise


class Noisy(Dataset):
    """Draws as crops and flips do; each sample takes another time."""

    def __init__(self):
        self.rng = np.random.default_rng(5)

    def __len__(self):
        return NUM

    def __getitem__(self, idx):
        assert type(idx) is int
        time.sleep(0.0003 * (NUM - idx) * (idx % 3))
        noise = torch.randn(3) + torch.empty(3).uniform_(0, 0.1)
        return idx / NUM + noise + self.rng.random(), torch.randn(1)


class Deep(Noisy):
    def __init__(self):
        super().__init__()
        self.transforms = {"noise": [Transform()]}

    def __getitem__(self, idx):
        inputs, targets = super().__getitem__(idx)
        return self.transforms["noise"][0](inputs), targets


def collate(samples):
    inputs, targets = zip(*samples, strict=True)
    return torch.stack(inputs) + torch.rand(1), torch.stack(targets)


def fit(folder, batch=-1, make=lambda: ThreadedDataLoader(Noisy(), 4, shuffle=True), sees=None):
    """Trains two epochs with dropout, which draws from torch's global generator meanwhile."""
    task = Task(
        model=lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(), nn.Linear(8, 1)),
        train_dataloader=make,
        loss=mse_loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    )
    given = {"max_duration": "2ep", "checkpoint_interval": "1ba", "seed": 3}
    with isolated_trainer(
        folder, task, algorithms=[Dies(batch), *([sees] if sees else [])], **given
    ) as one:
        one.fit()


class Seen:
    """An algorithm that keeps all batches."""

    name = "seen"

    def __init__(self):
        self.batches = []

    @hookimpl
    def before_train_batch(self, state):
        self.batches.append(torch.cat(state.batch, 1).clone())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("data", [Noisy, lambda: Subset(Noisy(), [*range(3, 29)])])
@pytest.mark.parametrize("collate_fn", [None, collate])
def test_samples_are_those_of_one_process(tmp_path, data, collate_fn):
    """In order, with the same random numbers, however many threads there are."""

    def seen(name, loader, **given):
        def make():
            return loader(data(), 4, shuffle=True, collate_fn=collate_fn, **given)

        fit(tmp_path / name, make=make, sees=(found := Seen()))
        return found.batches

    expected = seen("plain", DataLoader)

    for num_threads in (1, 4):
        batches = seen(f"{num_threads}", ThreadedDataLoader, num_workers=num_threads)
        assert all(map(torch.equal, batches, expected)), num_threads
        assert len(batches) == len(expected)


def test_generators_below_the_data_set_are_seeded_too(tmp_path):
    """Shared by threads, they would depend on the speed of each."""
    runs = []
    for num_threads in (1, 3):
        make = partial(ThreadedDataLoader, Deep(), 4, shuffle=True, num_workers=num_threads)
        fit(tmp_path / f"{num_threads}", make=make, sees=(found := Seen()))
        runs.append(found.batches)

    assert all(map(torch.equal, *runs))


def test_a_killed_run_ends_with_the_bits_of_one_in_one_go(tmp_path):
    """With as many threads as there are tasks ahead."""
    runs = KilledRuns(fit, tmp_path / "whole")

    assert runs.differing(tmp_path / "killed", 2, 6, 11) == []


class Global(Noisy):
    """Draws from a generator of the process, from a sample on."""

    def __init__(self, draw, first):
        super().__init__()
        self.draw, self.first = draw, first

    def __getitem__(self, idx):
        if idx >= self.first:
            self.draw()
        return super().__getitem__(idx)


@pytest.mark.parametrize("first", [0, 17])
@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (random.random, "python"),
        (np.random.rand, "numpy"),
        (lambda: dropout(torch.ones(3)), "dropout"),
        (lambda: torch.rand_like(torch.ones(3)), "rand_like"),
    ],
)
def test_draws_that_threads_share_are_refused(tmp_path, draw, name, first):
    """Also where a data set begins to draw late; silence would be another run each time."""
    with pytest.raises(TaskError, match=name):
        fit(tmp_path, make=lambda: ThreadedDataLoader(Global(draw, first), 4))


@pytest.mark.parametrize("use", [lambda: torch.manual_seed(0), torch.initial_seed])
def test_the_seed_of_torch_is_the_trainings(tmp_path, use):
    """Set, it would seed dropout; read, it isn't the sample's, as it is in a worker."""
    with pytest.raises(TaskError, match="torch"):
        fit(tmp_path, make=lambda: ThreadedDataLoader(Global(use, 0), 4))


class Draws:
    """An algorithm that draws from NumPy's global generator in each step."""

    name = "draws"

    @hookimpl
    def before_train_batch(self):
        np.random.rand()
        time.sleep(0.002)


def test_a_training_may_draw(tmp_path):
    """It isn't taken for the data set."""
    fit(tmp_path, sees=Draws())


class Fails(Noisy):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def __getitem__(self, idx):
        if idx == 13:
            raise self.error("no such file")
        return super().__getitem__(idx)


@pytest.mark.parametrize("error", [OSError, StopIteration])
def test_an_error_names_its_sample_and_comes_in_order(error):
    """Batches before it are trained on; those behind it are read, too."""
    batches = iter(ThreadedDataLoader(Fails(error), 4, num_workers=3))
    assert [len(next(batches)[0]) for _ in range(3)] == [4, 4, 4]

    with pytest.raises(RuntimeError if error is StopIteration else error) as raised:
        next(batches)
    source = raised.value if error is OSError else raised.value.__cause__
    assert any("raised by sample 13 in a thread" in note for note in source.__notes__)
    assert len(next(batches)[0]) == 4


def test_no_more_is_read_ahead_than_torchs_workers_would():
    """Or slow training would fill the memory."""
    reads = []

    class Reads(Noisy):
        def __getitem__(self, idx):
            reads.append(idx)
            return idx

    batches = iter(ThreadedDataLoader(Reads(), 2, num_workers=2, prefetch_factor=3))
    next(batches)
    batches._tasks.put(None), batches._tasks.put(None)
    [thread.join() for thread in batches._threads]

    assert sorted(reads) == [0, 0, *range(1, 14)]  # the first one is looked at before


def test_threads_end_with_the_epoch_and_with_the_iterator():
    """A run that ends early leaves none behind."""

    def names():
        now = threading.enumerate()
        return [one for one in now if one.name == "data loader" and one not in before]

    before = threading.enumerate()
    loader = ThreadedDataLoader(Noisy(), 4, num_workers=3)
    assert len([*loader]) == 8
    assert not names()

    batches = iter(loader)
    next(batches)
    threads = names()
    assert len(threads) == 3
    del batches
    for one in threads:
        one.join(10)
    assert not names()


def test_a_batch_that_does_not_come_is_an_error():
    """As with torch's `timeout`."""
    go = threading.Event()

    class Hangs(Noisy):
        def __getitem__(self, idx):
            if idx:
                go.wait()
            return idx

    batches = iter(ThreadedDataLoader(Hangs(), 4, timeout=0.05))
    with pytest.raises(RuntimeError, match=r"timeout=0\.05"):
        next(batches)
    go.set()


def test_other_data_sets_work_as_with_torch():
    """Without batches, with whole batches by `__getitems__`, and tensors in memory."""
    data = TensorDataset(torch.arange(10))

    assert [int(one) for (one,) in ThreadedDataLoader(data, None)] == [*range(10)]
    batches = [batch.tolist() for (batch,) in ThreadedDataLoader(data, 4)]
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([1])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ThreadedDataLoader(Stream()), "Batches"),
        (lambda: ThreadedDataLoader([1], num_workers=0), "num_workers=0"),
        (lambda: ThreadedDataLoader([1], worker_init_fn=print), "worker_init_fn"),
        (lambda: ThreadedDataLoader([1], persistent_workers=True), "persistent_workers"),
    ],
)
def test_what_threads_can_not_do_is_an_error(make, words):
    """Silently ignored, an option would be a promise that is broken."""
    with pytest.raises((TypeError, ValueError), match=words):
        make()
