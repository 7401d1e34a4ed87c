"""Batches of several data loaders in microbatches: each has the same share of every part."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Task, hookimpl
from eventloop.batch_limits import LimitBatches
from eventloop.data import cycled, zipped
from eventloop.errors import TaskError
from eventloop_testing import isolated_trainer, run_ranks

GENERATOR = torch.Generator().manual_seed(0)
LABELLED = TensorDataset(torch.randn(32, 3, generator=GENERATOR), torch.arange(32) % 3)
OTHERS = TensorDataset(torch.randn(80, 3, generator=GENERATOR))


def both(sizes=(8, 20), *, by_name=True):
    parts = {
        "labelled": DataLoader(LABELLED, sizes[0], shuffle=True),
        "others": cycled(DataLoader(OTHERS, sizes[1], shuffle=True)),
    }
    return zipped(parts) if by_name else zipped(*parts.values())


def forward(model, batch):
    (inputs, targets), (others,) = batch.values() if isinstance(batch, Mapping) else batch
    sure = model(others).softmax(1).square().sum(1).mean()
    return {"loss": cross_entropy(model(inputs), targets) - 0.3 * sure}


class Sizes:
    """Notes the samples of each part of each microbatch."""

    name = "sizes"

    def __init__(self):
        self.seen = []

    @hookimpl
    def before_forward(self, state):
        parts = state.microbatch
        parts = parts.values() if isinstance(parts, Mapping) else parts
        self.seen.append(tuple(len(one[0]) for one in parts))


def trained(folder, loader=None, *plugins, **given):
    """Trains an epoch; returns the weights, and the sizes of the microbatches."""
    sizes = Sizes()
    task = Task(
        model=lambda: torch.nn.Linear(3, 3),
        forward=forward,
        train_dataloader=loader or both(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    settings = {"max_duration": "1ep"} | given
    with isolated_trainer(
        folder, task, algorithms=plugins, callbacks=[sizes], **settings
    ) as trainer:
        weights = trainer.fit().model.state_dict()
    return dict(weights), sizes.seen


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize(("size", "pieces"), [(4, [(4, 10)] * 2), (2, [(2, 5)] * 4)])
def test_each_microbatch_has_the_same_share_of_every_part(tmp_path, size, pieces, by_name):
    """So that the gradient is that of the whole batch."""
    expected, whole = trained(tmp_path / "whole", both(by_name=by_name))

    actual, seen = trained(tmp_path / "parts", both(by_name=by_name), microbatch_size=size)

    assert (whole, seen) == ([(8, 20)] * 4, pieces * 4)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def test_the_last_microbatch_may_be_smaller(tmp_path):
    """As that of one data loader: its shares are smaller alike."""
    expected, _ = trained(tmp_path / "whole", both((8, 16)))

    actual, seen = trained(tmp_path / "parts", both((8, 16)), microbatch_size=3)

    assert seen[:3] == [(3, 6), (3, 6), (2, 4)]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("sizes", "size", "fix"),
    [((8, 20), 3, "a multiple of 2"), ((8, 10), 3, "a multiple of 4"), ((8, 9), 4, "unset")],
)
def test_a_share_that_ends_within_a_sample_is_refused(tmp_path, sizes, size, fix):
    """The gradient would be another one; the message has the sizes that fit."""
    with pytest.raises(TaskError, match=rf"within a sample of 'others'[\s\S]*{fix}"):
        trained(tmp_path, both(sizes), microbatch_size=size)


@pytest.mark.filterwarnings("ignore:out of memory")
def test_what_does_not_fit_into_memory_is_halved(tmp_path):
    """`auto` counts the samples of the first part, too."""

    class Small:
        name = "small"

        @hookimpl
        def before_forward(self, state):
            if len(state.microbatch["labelled"][0]) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory")

    expected, _ = trained(tmp_path / "whole")

    actual, seen = trained(tmp_path / "auto", both(), Small(), microbatch_size="auto")

    assert seen[-2:] == [(4, 10), (4, 10)]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def test_a_limited_number_of_batches_is_split_likewise(tmp_path):
    """`--limit-train-batches` hands the first ones on."""
    _, seen = trained(tmp_path, both(), LimitBatches(train_batches=2), microbatch_size=4)

    assert seen == [(4, 10)] * 4


def test_two_ranks_split_as_one_process_does(tmp_path):
    """Each its own part of both."""
    results = run_ranks(trained, tmp_path, both((4, 10)), microbatch_size=2)

    assert [seen for _, seen in results] == [[(2, 5)] * 8] * 2
    assert all(torch.equal(results[0][0][name], one) for name, one in results[1][0].items())


def test_what_a_plugin_puts_in_the_place_of_a_batch_is_split_as_any_other(tmp_path):
    """It isn't made of the data loaders' parts."""
    sizes = []

    class Own:
        name = "own"

        @hookimpl
        def train_batch(self, state):
            state.batch = {"rows": torch.ones(6, 3, device=state.device)}
            return state.update(self.loss_of)

        def loss_of(self, state):
            sizes.append(len(state.microbatch["rows"]))
            return state.model(state.microbatch["rows"]).square().mean()

    task = Task(
        model=lambda: torch.nn.Linear(3, 3),
        train_dataloader=both(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    settings = {"max_duration": "1ba", "microbatch_size": 4}
    with isolated_trainer(tmp_path, task, algorithms=[Own()], **settings) as trainer:
        trainer.fit()

    assert sizes == [4, 2]
