"""A pass over the training data beside the run: the run ends with the bits of one without it."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
)

from eventloop import hookimpl
from eventloop.data import cycled, zipped
from eventloop.errors import ReadOnlyStateError, TaskError
from eventloop_testing import isolated_trainer, run_ranks, tiny_batches, tiny_task

X, Y = map(torch.cat, zip(*tiny_batches(5), strict=True))


class Noisy(Dataset):
    """Draws from the generators that all share, and from one of its own."""

    def __init__(self):
        self.own = torch.Generator().manual_seed(1)

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        noise = torch.randn((), generator=self.own) + torch.randn(()) + random.random()
        return X[index] + 0.1 * noise, Y[index]


class Rotating(Sampler):
    """Begins one further with each turn, and knows that by itself."""

    def __init__(self):
        self.first = 0

    def __len__(self):
        return len(X)

    def __iter__(self):
        self.first += 1
        return iter([(self.first + idx) % len(X) for idx in range(len(X))])


def shuffled_by_own():
    return DataLoader(TensorDataset(X, Y), 4, shuffle=True, generator=torch.Generator())


def shuffled_by_sampler():
    data = TensorDataset(X, Y)
    return DataLoader(data, 4, sampler=RandomSampler(data, generator=torch.Generator()))


LOADERS = {
    "list": lambda: tiny_batches(5),
    "shuffled": lambda: DataLoader(TensorDataset(X, Y), 4, shuffle=True),
    "own generator": shuffled_by_own,
    "sampler's generator": shuffled_by_sampler,
    "own sampler": lambda: DataLoader(TensorDataset(X, Y), 4, sampler=Rotating()),
    "drawing": lambda: DataLoader(Noisy(), 4, shuffle=True),
    "workers that stay": lambda: DataLoader(
        Noisy(), 4, shuffle=True, num_workers=1, persistent_workers=True
    ),
}


class Looks:
    """Goes over the data in mid-epoch, with draws of its own, and stops half-way now and then."""

    name = "looks"

    def __init__(self):
        self.num_batches = []

    @hookimpl
    def batch_checkpoint(self, state):
        batch = state.clock.batch
        if batch in (2, 5, 7):
            with state.training_pass() as batches:
                found = []
                for inputs, _ in batches:
                    found.append(inputs + torch.randn_like(inputs))
                    if batch == 7 and len(found) == 2:
                        break
            self.num_batches.append(len(found))


def weights_after(folder, loader, *algorithms, **settings):
    task = tiny_task(train_dataloader=loader, eval_dataloaders=None)
    given = {"max_duration": "3ep"} | settings
    with isolated_trainer(folder, task, algorithms=algorithms, **given) as trainer:
        trainer.fit()
        return torch.cat([one.detach().flatten() for one in trainer.state.model.parameters()])


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed_samples", [True, False])
@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_the_run_notices_nothing(tmp_path, make, seed_samples):
    """Order, position and draws are those of a run without the passes."""
    looks = Looks()
    given = {"seed_samples": seed_samples}
    expected = weights_after(tmp_path / "without", make(), **given)

    actual = weights_after(tmp_path / "with", make(), looks, **given)

    assert torch.equal(actual, expected)
    assert looks.num_batches == [5, 5, 2]


class Draws:
    """Does what a pass mustn't."""

    name = "draws"

    @hookimpl
    def batch_checkpoint(self, state):
        torch.randn(1)


def test_a_draw_that_is_left_is_noticed(tmp_path):
    """Control: the comparison sees a single number of the global generator."""
    make = LOADERS["shuffled"]

    assert not torch.equal(
        weights_after(tmp_path / "without", make()),
        weights_after(tmp_path / "with", make(), Draws()),
    )


class Stream(IterableDataset):
    def __iter__(self):
        return zip(X, Y, strict=True)


@pytest.mark.parametrize("loader", [DataLoader(Stream(), 4), (one for one in tiny_batches(30))])
def test_a_stream_is_refused(tmp_path, loader):
    """Whoever reads it twice takes samples away from the run, or can't know."""
    with pytest.raises(TaskError, match="can't be iterated over during training"):
        weights_after(tmp_path, loader, Looks(), max_duration="6ba")


class Positioned:
    """A loader that keeps its position itself, the same on all ranks."""

    suits_any_ranks = True

    def __len__(self):
        return 5

    def __iter__(self):
        return iter(tiny_batches(5))

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(
    "loader",
    [
        Positioned(),
        zipped(tiny_batches(5), Positioned()),
        zipped(tiny_batches(5), cycled(Positioned())),
    ],
    ids=["alone", "zipped", "cycled"],
)
def test_a_loader_with_a_position_of_its_own_is_refused(tmp_path, loader):
    """A second pass over it would move the run's, in whatever it is combined."""
    task = tiny_task(train_dataloader=loader)
    with isolated_trainer(tmp_path, task) as trainer:
        with pytest.raises(TaskError, match="can't be iterated over during training"):
            with trainer.state.training_pass():
                pass


def test_each_rank_gets_its_part(tmp_path):
    """All ranks together see an epoch once."""

    def look():
        loader = DataLoader(TensorDataset(X, Y), 2)
        with isolated_trainer(tmp_path, tiny_task(train_dataloader=loader)) as trainer:
            with trainer.state.training_pass() as batches:
                return torch.cat([inputs for inputs, _ in batches])

    parts = run_ranks(look)

    everything = torch.cat(parts)
    assert len(parts[0]) == len(parts[1]) == 10
    assert sorted(everything.flatten().tolist()) == sorted(X.flatten().tolist())


def test_a_callback_has_no_pass(tmp_path):
    """It would compute beside the training, where nobody expects it."""

    class Watch:
        @hookimpl
        def fit_start(self, state):
            state.training_pass()

    with (
        pytest.raises(ReadOnlyStateError, match="isn't available to a callback"),
        isolated_trainer(tmp_path, callbacks=[Watch()]) as trainer,
    ):
        trainer.fit()
