"""The core's plugin for several ranks: what it refuses, says of the data, and exchanges."""

from __future__ import annotations

import jsonargparse  # noqa: F401  each rank, a fork, would take seconds for these imports
import pytest
import torch
import torch._dynamo
import torchmetrics  # noqa: F401
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from eventloop import hookimpl
from eventloop_testing import isolated_trainer, run_ranks, tiny_task
from eventloop_testing.case import tiny_batches
from eventloop_testing.ranks import RankError


class Stream(IterableDataset):
    def __iter__(self):
        return iter(tiny_batches(2))


def test_data_that_only_itself_can_split_is_named(tmp_path):
    """Whether it does can't be known; if it doesn't, every rank silently repeats the work of the others."""
    listed, streamed = tiny_batches(2), DataLoader(Stream(), batch_size=None)

    def notes(train, evaluation):
        task = tiny_task(train_dataloader=train, eval_dataloaders={"test": evaluation})
        with isolated_trainer(tmp_path, task) as trainer:
            return trainer.notes

    (note,), _ = run_ranks(lambda: notes(streamed, listed))
    (both,), _ = run_ranks(lambda: notes((one for one in listed), streamed))
    samples = DataLoader(TensorDataset(torch.ones(8, 3), torch.ones(8).long()), 4)
    nothing, _ = run_ranks(lambda: notes(listed, samples))

    assert note.startswith("data: eventloop can't split train over the ranks")
    assert "islice(samples, state.data_rank, None, state.data_world_size)" in note
    assert "can't split train, eval/test over" in both
    assert nothing == ()


def test_shapes_that_no_rank_knows_yet_are_refused(tmp_path):
    """A lazy layer has none before its first batch: nothing could be compared, nor exchanged."""
    task = tiny_task(model=lambda: nn.LazyLinear(3))

    with pytest.raises(RankError, match=r"TaskError: the shape of 'weight' isn't known before"):
        run_ranks(isolated_trainer, tmp_path, task)


class Exchanges:
    """Notes before each backward whether it will exchange gradients."""

    name = "exchanges"

    def __init__(self):
        self.seen = []

    @hookimpl
    def before_backward(self, state):
        self.seen.append(state.wrapped_model.require_backward_grad_sync)


def test_gradients_are_exchanged_on_the_last_microbatch_alone(tmp_path):
    """Three exchanges of four would be work for nothing; the weights are the same."""

    def run():
        exchanges = Exchanges()
        given = {"microbatch_size": 1, "max_duration": "2ba"}
        with isolated_trainer(tmp_path, tiny_task(), algorithms=[exchanges], **given) as trainer:
            trainer.fit()
        return exchanges.seen

    assert run_ranks(run) == [[False, False, False, True] * 2] * 2
