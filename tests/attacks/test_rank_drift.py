"""Attacks on the sameness of ranks: what must be alike and isn't, before the run and in it."""

from __future__ import annotations

import os

import jsonargparse  # noqa: F401  each rank, a fork, would take seconds for these imports
import pytest
import torch
import torch._dynamo
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from eventloop import hookimpl, schedules
from eventloop.errors import EventloopError
from eventloop_testing import isolated_trainer, run_ranks, tiny_task
from eventloop_testing.case import tiny_batches

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(48, 3, generator=GENERATOR)
Y = X.argmax(1)


def rank() -> int:
    return int(os.environ["RANK"])


def train(tmp_path, make_task, plugins=(), **settings):
    """Trains on this rank; returns what was raised."""
    try:
        given = {"max_duration": "4ba", "eval_interval": None} | settings
        with isolated_trainer(tmp_path, make_task(), algorithms=plugins, **given) as trainer:
            trainer.fit()
    except EventloopError as error:
        return str(error)
    return "nothing"


def groups_by(**given):
    def make(model):
        weights = [one for one in model.parameters() if one.ndim > 1]
        others = [one for one in model.parameters() if one.ndim < 2]
        return AdamW([{"params": weights, **given}, {"params": others}])

    return make


# What differs by rank, and what the error names: the setting, then both values.
DIFFERENCES = {
    "learning rate": (
        lambda: {"optimizer": lambda model: SGD(model.parameters(), lr=0.1 * (1 + rank()))},
        "optimizers differ",
        "groups.0.lr: 0.1 on rank 0, 0.2 on rank 1",
    ),
    "learning rate by a hair": (
        lambda: {"optimizer": lambda model: SGD(model.parameters(), lr=0.1 + 1e-12 * rank())},
        "optimizers differ",
        "groups.0.lr: 0.1 on rank 0, 0.10000000000",
    ),
    "betas": (
        lambda: {"optimizer": lambda model: AdamW(model.parameters(), betas=(0.9, 0.9 + rank()/20))},
        "optimizers differ",
        "groups.0.betas.1: 0.9 on rank 0, 0.95",
    ),
    "weight decay of a group": (
        lambda: {"optimizer": groups_by(weight_decay=0.01 * rank())},
        "optimizers differ",
        "groups.0.weight_decay: 0.0 on rank 0, 0.01 on rank 1",
    ),
    "optimizer": (
        lambda: {"optimizer": lambda model: (SGD, AdamW)[rank()](model.parameters(), lr=0.1)},
        "optimizers differ",
        "sgd.kind: torch.optim.sgd.SGD on rank 0, nothing on rank 1",
    ),
    "parameters of a group": (
        lambda: {"optimizer": lambda model: SGD(list(model.parameters())[rank() :], lr=0.1)},
        "optimizers differ",
        "groups.0.params: 0.weight [8, 3], 0.bias [8]",
    ),
    "a tensor as learning rate": (
        lambda: {"optimizer": lambda model: SGD(model.parameters(), lr=torch.tensor(1.0 + rank()))},
        "optimizers differ",
        "groups.0.lr: 1.0 on rank 0, 2.0 on rank 1",
    ),
    "schedule": (
        lambda: {"scheduler": schedules.cosine(final_frac=0.1 * rank())},
        "schedules differ",
        "final_frac: 0.0 on rank 0, 0.1 on rank 1",
    ),
    "schedule of torch": (
        lambda: {"scheduler": lambda one: StepLR(one, 10 + rank())},
        "schedules differ",
        "step_size: 10 on rank 0, 11 on rank 1",
    ),
    "samples": (
        lambda: {"train_dataloader": DataLoader(TensorDataset(X[rank():], Y[rank():]), 4)},
        "data differ",
        "train.samples: 48 on rank 0, 47 on rank 1",
    ),
    "batch size": (
        lambda: {"train_dataloader": DataLoader(TensorDataset(X, Y), 4 * (1 + rank()))},
        "data differ",
        "train.batch_size: 4 on rank 0, 8 on rank 1",
    ),
    "batches of a list": (
        lambda: {"train_dataloader": tiny_batches(4 + rank())},
        "data differ",
        "train.batches: 4 on rank 0, 5 on rank 1",
    ),
    "samples to evaluate": (
        lambda: {"eval_dataloaders": {"test": tiny_batches(4 + rank())}},
        "data differ",
        "eval/test.batches: 4 on rank 0, 5 on rank 1",
    ),
}  # fmt: skip


# With every change; the others nightly.
OFTEN = {"learning rate", "optimizer", "schedule", "samples"}


@pytest.mark.parametrize(
    "kind",
    [one if one in OFTEN else pytest.param(one, marks=pytest.mark.nightly) for one in DIFFERENCES],
)
def test_what_must_be_alike_is_compared_before_the_first_step(kind, tmp_path):
    """What differs is named, with the rank and both values, on all ranks."""
    make, what, differs = DIFFERENCES[kind]

    def run():
        return train(tmp_path, lambda: tiny_task(**make()))

    for text in run_ranks(run):
        assert text.startswith("ranks 0 and 1 would train differently: their ")
        assert what in text
        assert differs in text


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(X[:4], Y[:4])] * (2 + rank()))


# What ranks may have of their own.
FREE = {
    "an object of its own": lambda: {
        "optimizer": lambda model: SGD([{"params": model.parameters(), "tag": object()}], lr=0.1)
    },
    "a stream": lambda: {"train_dataloader": DataLoader(Stream(), batch_size=None)},
    "functions": lambda: {"scheduler": lambda one: LambdaLR(one, lambda epoch: 1.0)},
}


@pytest.mark.parametrize("kind", FREE)
def test_what_ranks_may_have_of_their_own_is_no_difference(kind, tmp_path):
    """Control: what can't be compared, or is shared out by the data itself."""

    def run():
        return train(tmp_path, lambda: tiny_task(**FREE[kind]()), max_duration="2ba")

    assert run_ranks(run) == ["nothing", "nothing"]


class Does:
    """An algorithm that does something on rank 1 alone, after a number of batches."""

    name = "does"

    def __init__(self, what: str, batch: int) -> None:
        self.what, self.batch = what, batch

    @hookimpl
    def batch_end(self, state):
        if state.rank == 1 and state.clock.batch == self.batch:
            IN_MID_RUN[self.what][0](state)


def optimizer_of(state):
    return next(iter(state.optimizers.values()))


def halve_rate(state):
    for group in optimizer_of(state).param_groups:
        group["lr"] /= 2


def write(state):
    with torch.no_grad():
        state.model[2].weight[0, 0] += 1


def add_momentum(state):
    first = state.model[2].bias
    optimizer_of(state).state[first]["momentum_buffer"].add_(1)


# What one rank does, and what the error says when the weights were seen at batches 0, 100 and 200.
IN_MID_RUN = {
    "halves the rate": (halve_rate, "their optimizers differ", "lr: 0.1 on rank 0, 0.05 on rank 1"),
    "writes a weight": (write, "ranks 0 and 1 have drifted apart", "'2.weight' differs since"),
    "changes a momentum": (
        add_momentum,
        "ranks 0 and 1 have drifted apart",
        "differs since a batch of",
    ),
}


@pytest.mark.parametrize("what", IN_MID_RUN)
@pytest.mark.parametrize(
    ("batch", "length", "first", "last"),
    [
        pytest.param(3, 12, 1, 12, id="end"),
        pytest.param(130, 230, 101, 200, id="middle", marks=pytest.mark.nightly),
    ],
)
def test_ranks_that_drift_apart_are_found(what, batch, length, first, last, tmp_path):
    """By the end of the fit, and every hundred batches; with the first parameter and the batches."""
    _, says, differs = IN_MID_RUN[what]

    def run():
        plugins = [Does(what, batch)]
        return train(tmp_path, tiny_task, plugins, max_duration=f"{length}ba")

    for text in run_ranks(run):
        assert says in text
        assert differs in text
        assert f"since a batch of {first} to {last}" in text or f"as seen at batch {last}" in text


def test_what_isnt_shared_may_differ(tmp_path):
    """Control: parameters that DDP was told to leave alone, and frozen ones."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.own = nn.Linear(3, 3), nn.Linear(3, 3)
            self._ddp_params_and_buffers_to_ignore = ["own.weight", "own.bias"]
            self.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)

        def forward(self, inputs):
            return self.body(inputs) + self.own(inputs)

    class Differs:
        name = "differs"

        @hookimpl
        def batch_end(self, state):
            with torch.no_grad():
                state.model.frozen += state.rank

    def run():
        return train(tmp_path, lambda: tiny_task(model=Own), [Differs()], max_duration="6ba")

    assert run_ranks(run) == ["nothing", "nothing"]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"microbatch_size": "auto"}, marks=pytest.mark.nightly),
        pytest.param({"clip_norm": 0.01}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_ranks_that_are_alike_are_left_alone(settings, tmp_path):
    """Control: also where gradients are averaged by the core itself."""

    def run():
        return train(tmp_path, tiny_task, max_duration="230ba", **settings)

    assert run_ranks(run) == ["nothing", "nothing"]
