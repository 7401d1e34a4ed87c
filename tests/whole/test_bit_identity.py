"""The loop trains as a loop written by hand does, to the last bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Task, hookimpl
from eventloop.plugin.observe import Around
from eventloop_check import Check

NUM_EPOCHS = 2


@dataclass(frozen=True)
class Case:
    """How both loops train."""

    precision: str = "fp32"
    microbatch_size: int | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    scheduler_interval: str | None = None
    num_optimizers: int = 1
    overflows: tuple[int, ...] = ()

    def __str__(self) -> str:
        return "-".join(f"{value}" for value in dataclasses.astuple(self) if value)


class Trained(NamedTuple):
    """What a loop leaves behind."""

    state_dict: dict[str, Tensor]
    learning_rates: list[float]


CLIPS = [(None, None), (0.2, None), (None, 0.01), (0.2, 0.01)]
CASES = [
    Case(precision, microbatch_size, *clip, interval)
    for precision, microbatch_size, clip, interval in product(
        ["fp32", "bf16", "fp16"], [None, 4], CLIPS, [None, "ba", "ep"]
    )
]
CASES += [
    Case("fp16", microbatch_size, clip_norm, None, interval, num_optimizers, overflows)
    for microbatch_size, clip_norm, interval, num_optimizers, overflows in product(
        [None, 4], [None, 0.2], ["ba", "ep"], [1, 2], [(), (0, 1, 4, 5)]
    )
]
AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3)
    )


def make_loader() -> DataLoader:
    """Two batches of 16 and an uneven one of 10, in another order each epoch."""
    inputs = torch.randn(42, 6, generator=torch.Generator().manual_seed(7))
    return DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), batch_size=16, shuffle=True)


def make_optimizers(model: nn.Module, num_optimizers: int) -> dict[str, torch.optim.Optimizer]:
    params = list(model.parameters())
    shares = [params] if num_optimizers == 1 else [params[:2], params[2:]]
    names = ["sgd", "other"]
    return {
        name: torch.optim.SGD(share, lr=0.1, momentum=0.9) for name, share in zip(names, shares)
    }


def overflow(model: nn.Module) -> None:
    """Leaves gradients as backward does when one is larger than float16 can be."""
    for param in model.parameters():
        param.grad.view(-1)[0] = torch.inf


make_scheduler = partial(StepLR, step_size=1, gamma=0.7)


def share(num_samples: int, total: int) -> float:
    return num_samples / total


def plain_loop(case: Case, weigh: Callable[[int, int], float] = share) -> Trained:
    """What a person writes who trains with two epochs, microbatches, clipping and a scheduler."""
    torch.manual_seed(0)
    model = make_model()
    optimizers = make_optimizers(model, case.num_optimizers)
    schedulers = [make_scheduler(one) for one in optimizers.values()]
    scaler = torch.amp.GradScaler("cpu", enabled=case.precision == "fp16")
    dtype = AUTOCAST[case.precision]
    train_loader, eval_loader = make_loader(), make_loader()
    learning_rates, scales = [], []

    for _ in range(NUM_EPOCHS):
        for inputs, targets in train_loader:
            size = case.microbatch_size or len(inputs)
            for some_inputs, some_targets in zip(inputs.split(size), targets.split(size)):
                with torch.autocast("cpu", dtype, enabled=dtype is not None):
                    loss = cross_entropy(model(some_inputs), some_targets)
                scaler.scale(loss * weigh(len(some_inputs), len(inputs))).backward()
            if len(learning_rates) in case.overflows:
                overflow(model)
            # One for all: what is clipped by an infinite norm is of no use to the others either.
            finite = all(param.grad.isfinite().all() for param in model.parameters())
            for optimizer in optimizers.values():
                scaler.unscale_(optimizer)
            if case.clip_norm:
                clip_grad_norm_(model.parameters(), case.clip_norm)
            if case.clip_value:
                clip_grad_value_(model.parameters(), case.clip_value)
            learning_rates.append(optimizers["sgd"].param_groups[0]["lr"])
            for optimizer in optimizers.values():
                if finite:
                    scaler.step(optimizer)
                optimizer.zero_grad()
            scales.append(scaler.get_scale())
            scaler.update()
            if case.scheduler_interval == "ba" and scaler.get_scale() == scales[-1]:
                for scheduler in schedulers:
                    scheduler.step()
        if case.scheduler_interval == "ep":
            for scheduler in schedulers:
                scheduler.step()

        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for inputs, _ in eval_loader:
                model(inputs)
        model.train()
    momenta = [one.state_dict()["state"] for one in optimizers.values()]
    return Trained(model.state_dict() | by_name(momenta), learning_rates)


def by_name(momenta: list[dict[int, dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Returns the momenta as tensors of a state dict."""
    return {
        f"momentum.{optimizer_idx}.{param_idx}": state["momentum_buffer"]
        for optimizer_idx, states in enumerate(momenta)
        for param_idx, state in states.items()
    }


class Overflow:
    """Has gradients overflow in some batches."""

    name = "overflow"

    def __init__(self, batches: tuple[int, ...]) -> None:
        self.batches = batches

    @hookimpl
    def after_backward(self, state):
        if state.clock.batch in self.batches:
            overflow(state.model)


@pytest.fixture
def eventloop_trained(make_trainer, make_plugin) -> Callable[[Case], Trained]:
    """Trains the same with eventloop; the learning rates are those that loggers are told."""

    def train(case: Case, **given: Any) -> Trained:
        learning_rates = []
        task = Task(
            model=make_model,
            loss=cross_entropy,
            train_dataloader=make_loader,
            eval_dataloaders=make_loader,
            optimizer=lambda model: make_optimizers(model, case.num_optimizers),
            scheduler=make_scheduler if case.scheduler_interval else None,
            scheduler_interval=case.scheduler_interval or "ba",
        )
        listener = make_plugin(
            log=lambda numbers: learning_rates.extend(
                value for name, value in numbers.items() if name == "lr/sgd"
            )
        )
        settings = {
            "precision": case.precision,
            "microbatch_size": case.microbatch_size,
            "clip_norm": case.clip_norm,
            "clip_value": case.clip_value,
            "max_duration": f"{NUM_EPOCHS}ep",
        }
        trainer = make_trainer(
            task, algorithms=[Overflow(case.overflows)], callbacks=[listener], **settings | given
        )
        trainer.fit()
        momenta = [one.state_dict()["state"] for one in trainer.state.optimizers.values()]
        return Trained(trainer.state.model.state_dict() | by_name(momenta), learning_rates)

    return train


def same_bits(one: Trained, other: Trained) -> bool:
    return one.state_dict.keys() == other.state_dict.keys() and all(
        torch.equal(tensor, other.state_dict[name]) for name, tensor in one.state_dict.items()
    )


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights_are_those_of_the_plain_loop(case, eventloop_trained):
    """Whoever moves to eventloop gets the numbers that their own loop gave."""
    expected = plain_loop(case)

    actual = eventloop_trained(case)

    assert same_bits(actual, expected)
    assert actual.learning_rates == expected.learning_rates


@pytest.mark.parametrize("log_interval", ["1ba", "4ba", "10ba", "1ep"])
def test_learning_rates_are_logged_in_order_at_any_interval(log_interval, eventloop_trained):
    """How often numbers come to the host decides when loggers hear, not what."""
    case = Case(scheduler_interval="ba")

    actual = eventloop_trained(case, log_interval=log_interval)

    assert actual.learning_rates == plain_loop(case).learning_rates
    assert len(set(actual.learning_rates)) == 6


@pytest.mark.parametrize("interval", ["1ba", "2ba", "1ep", None])
def test_evaluations_leave_no_trace_in_the_weights(interval, eventloop_trained):
    """They draw the order of a shuffled set, but the training's draws stay what they were."""
    case = Case(microbatch_size=4)

    actual = eventloop_trained(case, eval_interval=interval)

    assert same_bits(actual, plain_loop(case))


@pytest.mark.parametrize(
    "case", [Case(precision, 4, 0.2, 0.01, "ba") for precision in AUTOCAST], ids=str
)
def test_watching_leaves_no_trace_in_the_weights(case, eventloop_trained):
    """What is found under --check is what happens without."""
    actual = eventloop_trained(
        case, observers=[Check(), Around(lambda plugin, hook, state: nullcontext())]
    )

    assert same_bits(actual, plain_loop(case))


def test_unweighted_microbatches_give_other_weights():
    """Control: 10 samples in 4, 4 and 2 are where the weights of the mean show."""
    case = Case(microbatch_size=4)

    unweighted = plain_loop(case, weigh=lambda num_samples, total: 1 / -(-total // 4))

    assert not same_bits(unweighted, plain_loop(case))


@pytest.mark.parametrize(
    "change",
    [
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"microbatch_size": 4},
        {"clip_norm": 0.2},
        {"clip_value": 0.01},
        {"scheduler_interval": "ba"},
        {"scheduler_interval": "ep"},
    ],
    ids=str,
)
def test_every_part_of_a_case_matters(change):
    """Control: a loop that ignored it would be found out."""
    assert not same_bits(plain_loop(Case(**change)), plain_loop(Case()))


def test_a_skipped_step_matters():
    """Control: in fp16, one that was made, or whose schedulers moved, would be found out."""
    case = Case("fp16", scheduler_interval="ba", num_optimizers=2)
    skipped = dataclasses.replace(case, overflows=(5,))

    assert not same_bits(plain_loop(skipped), plain_loop(case))
    assert not any(tensor.isnan().any() for tensor in plain_loop(skipped).state_dict.values())
