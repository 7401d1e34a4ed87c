"""Limits of batches, and overfitting the same few."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from eventloop.batch_limits import LimitBatches, Overfit
from eventloop.data.combined import FirstBatches
from eventloop.data.feed import Feed
from eventloop.distributed.processes import Processes


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.randn(3), torch.tensor(1)


def test_limits_hold_in_training_and_evaluation(make_trainer, make_task, make_batches):
    """The epoch ends early, and is an epoch like any other."""
    task = make_task(train_dataloader=make_batches(5), eval_dataloaders=make_batches(4))
    seen = []
    limit = LimitBatches(train_batches=2, eval_batches=3)
    trainer = make_trainer(task, algorithms=[limit], max_duration="3ep")
    move, trainer._loop.move = trainer._loop.move, lambda batch: seen.append(1) or move(batch)

    trainer.fit()

    assert (trainer.state.clock.epoch, trainer.state.clock.batch) == (3, 6)
    assert len(seen) == 3 * (2 + 3)


@pytest.mark.parametrize(
    ("dataloader", "limit", "length"),
    [([1, 2, 3], 2, 2), ([1], 2, 1), (DataLoader(Endless(), 4), 2, None)],
)
def test_a_limited_loader_knows_its_length_where_the_loader_does(dataloader, limit, length):
    """Fractions of an epoch, and of the run, are counted with it."""
    first = FirstBatches(dataloader, limit)

    assert first.num_batches == length


def test_a_limited_loader_tells_its_sampler_the_epoch():
    """Ranks would draw the same order each epoch."""
    data = TensorDataset(torch.arange(8))
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0)

    first = FirstBatches(DataLoader(data, 2, sampler=sampler), 2)
    Feed(first, Processes()).start_epoch(3)

    assert sampler.epoch == 3


def test_an_endless_loader_gets_an_end(make_trainer, make_task):
    """With a limit, epochs make sense."""
    task = make_task(train_dataloader=DataLoader(Endless(), 4))
    trainer = make_trainer(task, algorithms=[LimitBatches(train_batches=2)], max_duration="2ep")

    trainer.fit()

    assert trainer.state.clock.batch == 4


def test_overfitting_sees_the_same_batches_in_training_and_evaluation(
    make_trainer, make_task, make_recorder, make_plugin
):
    """A shuffled loader would bring others in each epoch."""
    data = TensorDataset(torch.randn(40, 3), torch.arange(40) % 3)
    task = make_task(train_dataloader=DataLoader(data, 4, shuffle=True))
    seen, evaluated = [], []
    watch = make_plugin(
        "watch",
        batch_start=lambda state: seen.append(state.inputs),
        eval_batch_start=lambda state: evaluated.append(state.inputs),
    )
    trainer = make_trainer(
        task, algorithms=[Overfit(batches=2)], callbacks=[watch], max_duration="3ep"
    )

    result = trainer.fit()

    assert len(seen) == 6
    assert all(torch.equal(one, seen[idx % 2]) for idx, one in enumerate(seen + evaluated))
    assert list(result.metrics) == ["overfit"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: LimitBatches(),
        lambda: LimitBatches(train_batches=0),
        lambda: LimitBatches(eval_batches=-1),
        lambda: Overfit(batches=0),
        lambda: Overfit(batches=0.5),
    ],
)
def test_what_is_no_number_of_batches_is_refused(make):
    """It would train on nothing, or on everything."""
    with pytest.raises(ValueError, match="batches"):
        make()
