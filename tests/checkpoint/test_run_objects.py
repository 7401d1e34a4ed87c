"""A run that is killed ends with the same bits, whatever its objects keep beside their state_dict."""

from __future__ import annotations

import collections
import contextlib
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.wrappers import MinMaxMetric

from eventloop import Task, TrainerBuilder, hookimpl
from eventloop.errors import ResumeError
from eventloop.run.differences import NOTHING, Allowed
from eventloop_testing import run_ranks

INPUTS = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, INPUTS.argmax(1))


class Noise(nn.Linear):
    """Adds noise of its own generators."""

    def __init__(self):
        super().__init__(3, 3)
        self.rng = {"torch": torch.Generator().manual_seed(0), "python": random.Random(1)}

    def forward(self, inputs):
        noise = torch.randn(inputs.shape, generator=self.rng["torch"])
        return super().forward(inputs + noise * self.rng["python"].random())


class Counter(nn.Linear):
    """Counts its steps, in a list of a submodule."""

    def __init__(self):
        super().__init__(3, 3)
        self.dropout = nn.Dropout(0.0)
        self.dropout.history = collections.deque([0], maxlen=2)

    def forward(self, inputs):
        if self.training:
            self.dropout.history.append(self.dropout.history[-1] + 1)
        return super().forward(inputs) / (1 + 0.1 * self.dropout.history[-1])


class Running(nn.Linear):
    """Has a buffer that isn't persistent, and a plain tensor that is made late."""

    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("mean", torch.zeros(3), persistent=False)
        self.last = None

    def forward(self, inputs):
        if self.training:
            self.mean.lerp_(inputs.mean(0), 0.1)
            self.last = inputs.detach().mean() if self.last is None else self.last * 0.9
        return super().forward(inputs - self.mean) * (1 if self.last is None else 1 + self.last)


class Anneal(nn.Linear):
    """Puts a part of itself into evaluation mode, and changes an option of another."""

    def __init__(self):
        super().__init__(3, 3)
        self.norm, self.dropout, self.num_calls = nn.BatchNorm1d(3), nn.Dropout(0.1), 0

    def forward(self, inputs):
        self.num_calls += self.training
        if self.num_calls == 4:
            self.norm.eval()
            self.dropout.p = 0.5
        return super().forward(self.dropout(self.norm(inputs)))


class CountingSGD(torch.optim.SGD):
    num_steps = 0

    def step(self, closure=None):
        self.num_steps += 1
        self.param_groups[0]["lr"] = 0.1 / self.num_steps
        return super().step(closure)


class SharedState(torch.optim.Optimizer):
    """Keeps one tensor under two names."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state["sum"] = state["nested"] = torch.zeros_like(param)
                state["views"] = [{"again": state["sum"]}]
            state["sum"].mul_(0.9).add_(param.grad)
            param.add_(state["nested"] + state["views"][0]["again"], alpha=-0.01)


class Norms(torch.optim.Optimizer):
    """Sums over its state, in the order of memory."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
            momentum.mul_(0.9).add_(param.grad, alpha=0.1)
            param.add_(momentum, alpha=-0.01 * float(param.norm() / (momentum.norm() + 1e-6)))


def convolutions():
    model = nn.Sequential(
        nn.Unflatten(1, (3, 1, 1)), nn.ZeroPad2d(2), nn.Conv2d(3, 16, 3), nn.Conv2d(16, 33, 3),
        nn.Flatten(), nn.Linear(33, 3),
    )  # fmt: skip
    return model.to(memory_format=torch.channels_last)


class SmoothedLoss(nn.Module):
    """A loss with a state that no `state_dict` of the model has."""

    def __init__(self):
        super().__init__()
        self.scale = np.float64(1.0)

    def forward(self, outputs, targets):
        loss = nn.functional.cross_entropy(outputs, targets)
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * loss.item()
        return loss / float(self.scale)


def closure_of_a_schedule():
    num_calls = 0

    def factor(step):
        nonlocal num_calls
        num_calls += 1
        return 1 / num_calls

    return factor


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def drawn_eval_set():
    generator = torch.Generator().manual_seed(1)
    return DataLoader(DATA, 4, sampler=RandomSampler(DATA, True, 8, generator=generator))


SETUPS = {
    "generators of a model": lambda: {"model": Noise},
    "counter of a submodule": lambda: {"model": Counter},
    "buffer that isn't persistent": lambda: {"model": Running},
    "mode and option of a submodule": lambda: {"model": Anneal},
    "attribute of an optimizer": lambda: {
        "optimizer": lambda model: CountingSGD(model.parameters(), lr=0.1)
    },
    "shared state of an optimizer": lambda: {
        "optimizer": lambda model: SharedState(model.parameters())
    },
    "memory format of a state": lambda: {
        "model": convolutions,
        "optimizer": lambda model: Norms(model.parameters()),
    },
    "state of a loss": lambda: {"loss": SmoothedLoss()},
    "closure of a schedule": lambda: {
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, closure_of_a_schedule()
        ),
        "scheduler_interval": "ba",
    },
    "generator of an eval set": lambda: {"eval_dataloaders": {"valid": drawn_eval_set()}},
    "extremes of a metric": lambda: {
        "eval_dataloaders": {"valid": drawn_eval_set()},
        "metrics": {"accuracy": MinMaxMetric(MulticlassAccuracy(3))},
    },
}


def make_task(setup):
    values = {
        "model": lambda: nn.Linear(3, 3),
        "loss": nn.functional.cross_entropy,
        "train_dataloader": DataLoader(DATA, 4, shuffle=True),
        "optimizer": sgd,
    }
    return Task(**values | setup())


class Killed(Exception):
    """Ends a run without an evaluation or a checkpoint at its end."""


class Kill:
    """Raises before a batch."""

    def __init__(self, batch):
        self.batch = batch

    @hookimpl
    def batch_start(self, state):
        if state.clock.batch == self.batch:
            raise Killed


def train(setup, run_dir, *, allowed=NOTHING, kill_at=-1, **settings):
    """Returns weights and history of a run that trains to its end, or is killed."""
    settings = {
        "autoload": False,
        "device": "cpu",
        "run_dir": run_dir,
        "max_duration": "18ba",
        "checkpoint_interval": "1ba",
        "callbacks": [Kill(kill_at)],
        **settings,
    }
    with TrainerBuilder(allowed=allowed).build(make_task(setup), **settings) as trainer:
        history = []
        with contextlib.suppress(Killed):
            history = trainer.fit().history
        weights = {name: one.clone() for name, one in trainer.state.model.state_dict().items()}
    rows = [{name: row[name] for name in row if name != "seconds"} for row in history]
    return weights, rows


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kill_at", [5, 12])
@pytest.mark.parametrize("name", SETUPS)
def test_a_killed_run_ends_with_the_same_bits(name, kill_at, tmp_path):
    """In mid-epoch and between epochs; nothing that a task keeps is on a list of ours."""
    weights, rows = train(SETUPS[name], tmp_path / "whole")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(SETUPS[name], tmp_path / "killed", kill_at=kill_at)
        resumed_weights, resumed_rows = train(SETUPS[name], tmp_path / "killed")

    assert resumed_rows == rows
    assert all(torch.equal(weights[key], resumed_weights[key]) for key in weights)


class MakesAnObject(nn.Linear):
    """Makes an object that no other process can make."""

    def __init__(self):
        super().__init__(3, 3)
        self.source = None

    def forward(self, inputs):
        if self.source is None:
            self.source = (1 + 1 / number for number in range(1, 1000))
        return super().forward(inputs) * (next(self.source) if self.training else 1.0)


def test_what_can_not_be_saved_is_named_at_the_first_save_and_refused_on_resume(tmp_path):
    """With its path and its type; who doesn't need it says so."""
    setup = lambda: {"model": MakesAnObject}  # noqa: E731
    words = r"checkpoints of this run lack model\.source \(it is an iterator whose position"
    with pytest.warns(UserWarning, match=words):
        train(setup, tmp_path, kill_at=5)

    with pytest.raises(ResumeError, match=r"the checkpoint lacks model\.source .*") as caught:
        train(setup, tmp_path)

    assert "lost_objects" in caught.value.fix
    with pytest.warns(UserWarning, match=words):
        train(setup, tmp_path, allowed=Allowed(lost_objects=True))


class MakesObjects(nn.Linear):
    """Makes an object that can't be saved in its third step, and another in its sixth."""

    def __init__(self):
        super().__init__(3, 3)
        self.early = self.late = None
        self.num_calls = 0

    def forward(self, inputs):
        self.num_calls += self.training
        if self.num_calls == 3:
            self.early = object()
        if self.num_calls == 6:
            self.late = object()
        return super().forward(inputs)


def test_each_loss_is_named_once_when_it_happens(tmp_path):
    """A second loss, after a warning of the first, would otherwise be met on resume."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(lambda: {"model": MakesObjects}, tmp_path, kill_at=9)

    messages = [str(warning.message) for warning in caught]
    named = [message for message in messages if "checkpoints of this run lack" in message]
    assert ["model.early" in message for message in named] == [True, False]
    assert ["model.late" in message for message in named] == [False, True]


def on_two_ranks(folder, kill_at=-1):
    return train(SETUPS["generators of a model"], folder, kill_at=kill_at)[0]


def test_ranks_keep_objects_of_their_own(tmp_path):
    """Two ranks that were killed end with the bits of two that weren't."""
    expected = run_ranks(on_two_ranks, tmp_path / "whole")
    run_ranks(on_two_ranks, tmp_path / "killed", 5)

    for weights, other in zip(run_ranks(on_two_ranks, tmp_path / "killed"), expected, strict=True):
        assert all(torch.equal(weights[key], other[key]) for key in other)


class Swaps:
    """Assigns another data loader after the first epoch."""

    name = "swaps"

    @hookimpl
    def epoch_end(self, state):
        if state.clock.epoch == 1:
            state.train_dataloader = DataLoader(TensorDataset(INPUTS * 2, INPUTS.argmax(1)), 4)


def test_a_data_loader_that_a_plugin_assigns_in_mid_run_is_named_and_refused(tmp_path):
    """A resumed run would train on the task's again."""
    setup = lambda: {"algorithms": [Swaps()]}  # noqa: E731
    words = r"lack train_dataloader \(a plugin has assigned another data loader; return it from"
    with pytest.warns(UserWarning, match=words):
        train(setup, tmp_path, kill_at=8)

    with pytest.raises(ResumeError, match="the checkpoint lacks train_dataloader"):
        train(setup, tmp_path)


def test_a_layer_that_is_compiled_in_the_run_is_not_lost(make_trainer):
    """A plugin may have compiled it; a resumed run does so again."""
    trainer = make_trainer(max_duration="2ep")
    trainer.fit(until="1ep")
    trainer.state.capture()

    trainer.state.model.compile(backend="eager")

    assert trainer.state.capture().parts["rank0"]["objects"]["lost"] == {}
