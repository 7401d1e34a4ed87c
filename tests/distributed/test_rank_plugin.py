"""The core's plugin for several ranks: what it refuses, says of the data, and exchanges."""

from __future__ import annotations

import os

import jsonargparse  # noqa: F401  each rank, a fork, would take seconds for these imports
import pytest
import torch
import torch._dynamo
import torchmetrics
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


def fit_on_ranks(tmp_path, look, task, **settings):
    """Trains on two ranks; returns what `look` finds in each trainer afterwards."""

    def run():
        folder = tmp_path / os.environ["RANK"]
        with isolated_trainer(folder, task(), **settings) as trainer:
            trainer.fit()
            return look(trainer)

    return run_ranks(run, timeout_s=60)


def test_metrics_within_another_one_count_each_sample_once(tmp_path):
    """Of a set of fewer samples than ranks, which each rank evaluates whole."""

    class Samples(torchmetrics.SumMetric):
        def update(self, outputs, targets):
            super().update(len(targets))

    def task():
        metrics = {"plain": Samples(), "within": torchmetrics.wrappers.MinMaxMetric(Samples())}
        one = DataLoader(TensorDataset(torch.ones(1, 3), torch.zeros(1).long()), 1)
        return tiny_task(eval_dataloaders={"test": one}, metrics=metrics)

    def look(trainer):
        return {name: float(one) for name, one in trainer.state.eval_metrics["test"].items()}

    for found in fit_on_ranks(tmp_path, look, task):
        assert found["plain"] == found["within.raw"] == 1.0


class Uneven(IterableDataset):
    """A stream that is longer on rank 0."""

    def __iter__(self):
        return iter(tiny_batches(5 if os.environ["RANK"] == "0" else 2))


class Values(torchmetrics.CatMetric):
    def update(self, outputs, targets):
        super().update(targets)


@pytest.mark.parametrize("kind", ["function", "torchmetrics", "list of values"])
def test_a_rank_without_batches_takes_part_in_metrics_of_training(tmp_path, kind):
    """They are over the samples of all ranks: where one has run out, the other would wait for it."""

    def task():
        metrics = {
            "function": lambda outputs, targets: targets.float().mean(),
            "torchmetrics": torchmetrics.classification.MulticlassAccuracy(3, average="micro"),
            "list of values": Values(),
        }
        stream = DataLoader(Uneven(), batch_size=None)
        return tiny_task(train_dataloader=stream, train_metrics={"seen": metrics[kind]})

    def look(trainer):
        return trainer.state.train_metrics["seen"].tolist()

    first, second = fit_on_ranks(tmp_path, look, task, log_interval="1ba")

    assert first == second


def test_other_numbers_of_microbatches_are_refused_with_synchronised_batch_norms(tmp_path):
    """Each forward pass exchanges statistics: one rank would wait for the other's."""

    def task():
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        batches = [
            tuple(one[:size] for one in batch)
            for batch, size in zip(tiny_batches(4), (4, 2, 4, 4), strict=True)
        ]
        return tiny_task(model=model, train_dataloader=batches)

    with pytest.raises(RankError, match="different numbers of microbatches, but sync_batch_norm"):
        fit_on_ranks(tmp_path, id, task, sync_batch_norm=True, microbatch_size=2)


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {"steps": 1}

    def set_extra_state(self, state):
        pass


@pytest.mark.parametrize("microbatch_size", [None, "auto"])
def test_a_model_may_have_a_state_that_is_no_tensor(tmp_path, microbatch_size):
    """`get_extra_state` returns what it likes: it has no shape to compare, and isn't exchanged."""

    def task():
        return tiny_task(model=lambda: WithExtraState(3, 3))

    def look(trainer):
        return trainer.state.clock.batch

    assert fit_on_ranks(tmp_path, look, task, microbatch_size=microbatch_size) == [2, 2]


def test_batch_norms_without_running_statistics_evaluate_alone(tmp_path):
    """As torch's do: ranks may have other numbers of eval batches."""

    def task():
        norm = nn.BatchNorm1d(1, track_running_stats=False)
        samples = TensorDataset(torch.arange(15.0).view(5, 3), torch.zeros(5).long())
        return tiny_task(
            model=lambda: nn.Sequential(nn.Unflatten(1, (1, 3)), norm, nn.Flatten()),
            eval_dataloaders={"test": DataLoader(samples, 2)},
        )

    def look(trainer):
        return float(trainer.state.eval_metrics["test"]["loss"])

    first, second = fit_on_ranks(tmp_path, look, task, sync_batch_norm=True)

    assert first == second
