"""`microbatch_size="auto"`: a batch that doesn't fit is run again, in smaller pieces."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassAccuracy

from eventloop import Task, hookimpl
from eventloop_testing import isolated_trainer, run_ranks, tiny_task
from eventloop_testing.ranks import RankError

X = torch.randn(4, 64, 3, generator=torch.Generator().manual_seed(0))
SIZES: list[int] = []


class Small(nn.Module):
    """Fails for more than so many samples, as a GPU does, after having drawn and counted."""

    def __init__(self, most):
        super().__init__()
        self.most = most
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 3))
        self.register_buffer("num_seen", torch.zeros(()))

    def forward(self, inputs):
        outputs = self.layers(inputs)
        if self.training:
            self.num_seen += len(inputs)
            SIZES.append(len(inputs))
        if len(inputs) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return outputs


@pytest.fixture
def train(tmp_path):
    """Trains on four batches of 64; gives weights, train metrics, and warnings."""

    def train(most, microbatch_size="auto", plugins=(), **settings):
        rank, world_size = (
            int(os.environ.get(name, i)) for i, name in enumerate(("RANK", "WORLD_SIZE"))
        )
        SIZES.clear()
        task = Task(
            model=lambda: Small(most if rank == 0 else 10_000),
            loss=cross_entropy,
            train_dataloader=iter(
                [(x[rank::world_size], x[rank::world_size].argmax(1)) for x in X]
            ),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            train_metrics={"accuracy": MulticlassAccuracy(3, average="micro")},
        )
        settings = {"microbatch_size": microbatch_size, "log_interval": "4ba", **settings}
        with (
            warnings.catch_warnings(record=True) as caught,
            isolated_trainer(tmp_path, task, algorithms=plugins, **settings) as trainer,
        ):
            warnings.simplefilter("always")
            trainer.fit()
            state = trainer.state
            weights = {name: one.clone() for name, one in state.model.state_dict().items()}
        return weights, state.train_metrics, [str(one.message) for one in caught], state.clock

    return train


def test_a_batch_that_does_not_fit_trains_as_in_microbatches_from_the_start(train):
    """Nothing is counted or drawn twice: dropout, buffers, metrics and samples are the same."""
    expected, metrics, _, _ = train(10_000, 16)

    actual, counted, warned, clock = train(16)

    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    assert counted == metrics
    assert clock.sample == 256
    assert warned == ["out of memory with microbatches of 64 samples: from batch 1 on they have 16"]
    assert [64, 32, *[16] * 16] == SIZES


class Attempts:
    """Notes attempts, and how often a batch and its microbatches are told of."""

    name = "attempts"

    def __init__(self):
        self.seen = []

    @hookimpl
    def before_train_batch(self, state):
        self.seen.append("batch")

    @hookimpl
    def before_forward(self, state):
        self.seen.append(state.attempt)


@pytest.mark.nightly
def test_microbatches_are_told_again_and_batches_are_not(train):
    """`state.attempt` tells how often a batch was begun again."""
    attempts = Attempts()

    train(16, plugins=[attempts])

    batch = ["batch", 0, 0, 0, 0]
    assert attempts.seen == ["batch", 0, 1, 2, 2, 2, 2, *batch * 3]


def test_two_ranks_shrink_together(train):
    """The rank that has memory enough follows, and gradients are exchanged when both are through."""
    expected, *_ = run_ranks(train, 10_000, 8)

    one, other = run_ranks(train, 8)

    for actual in (one, other):
        for name, tensor in expected[0].items():
            if name != "num_seen":
                torch.testing.assert_close(actual[0][name], tensor, rtol=0, atol=1e-6)
    assert one[2][0].startswith("out of memory with microbatches of 32 samples")
    assert other[2] == []


@pytest.mark.nightly
def test_a_sample_that_does_not_fit_is_an_error(train):
    """There is nothing left to halve."""
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train(0)

    assert "was reduced to one sample" in "".join(caught.value.__notes__)


class Fails:
    """Raises something else."""

    name = "fails"

    @hookimpl
    def after_forward(self, state):
        raise RuntimeError("not a matter of memory")


def test_other_errors_are_not_repeated(train):
    """Only a lack of memory is fixed by smaller pieces."""
    with pytest.raises(RuntimeError, match="not a matter of memory"):
        train(10_000, plugins=[Fails()])


def test_statistics_over_ranks_can_not_be_repeated(train):
    """A rank that has failed would leave the others waiting."""
    with pytest.raises(RankError, match="sync_batch_norm and microbatch_size='auto'"):
        run_ranks(train, 16, sync_batch_norm=True)


def test_a_batch_norm_without_a_shape_yet_is_trained(tmp_path):
    """Its statistics are made by the first forward pass."""
    task = tiny_task(model=lambda: nn.Sequential(nn.LazyBatchNorm1d(), nn.Linear(3, 3)))

    # The pretend accelerator can't hold buffers without a shape.
    with isolated_trainer(tmp_path, task, microbatch_size="auto", device="cpu") as trainer:
        trainer.fit()

    assert trainer.state.model[0].running_mean.shape == (3,)
