"""The task's schedulers: any of torch's, with the rates that a plain loop gives."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader, IterableDataset

from eventloop import Task, schedules
from eventloop.clock import Time
from eventloop.errors import SettingError, TaskError

STEPS_PER_EPOCH = 5
NUM_STEPS = 20


def sequential(optimizer):
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    return lr_scheduler.SequentialLR(
        optimizer, [first, lr_scheduler.ExponentialLR(optimizer, 0.9)], milestones=[3]
    )


def chained(optimizer):
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
         lr_scheduler.ExponentialLR(optimizer, 0.9)]
    )  # fmt: skip


MAKERS = {
    "LambdaLR": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    "MultiplicativeLR": partial(lr_scheduler.MultiplicativeLR, lr_lambda=lambda step: 0.9),
    "StepLR": partial(lr_scheduler.StepLR, step_size=3, gamma=0.5),
    "MultiStepLR": partial(lr_scheduler.MultiStepLR, milestones=[2, 3, 9], gamma=0.5),
    "ConstantLR": partial(lr_scheduler.ConstantLR, factor=0.5, total_iters=2),
    "LinearLR": partial(lr_scheduler.LinearLR, start_factor=0.1, total_iters=3),
    "ExponentialLR": partial(lr_scheduler.ExponentialLR, gamma=0.9),
    "PolynomialLR": partial(lr_scheduler.PolynomialLR, total_iters=12, power=2.0),
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=20),
    "CosineAnnealingWarmRestarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3),
    "CyclicLR": partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=3),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.5, total_steps=20),
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
}
WANTS_A_METRIC = {"ReduceLROnPlateau"}
OTHERS = {"LRScheduler", "_LRScheduler"}  # the base, by both names


def make_optimizer(model):
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.fixture
def build(make_trainer, make_task, make_batches):
    """Builds a trainer of 5 batches an epoch with this scheduler."""

    def build(scheduler, interval="ba", plugins=(), max_duration="4ep", **given):
        values = {"scheduler": scheduler, "scheduler_interval": interval,
                  "optimizer": make_optimizer,
                  "train_dataloader": make_batches(STEPS_PER_EPOCH)}  # fmt: skip
        task = make_task(**values | given)
        return make_trainer(task, algorithms=plugins, max_duration=max_duration)

    return build


@pytest.fixture
def trained_rates(build, make_plugin):
    """Trains up to a time, from what was saved; gives rates and the states to go on from."""

    def trained_rates(make, interval, until="4ep", saved=None, plugins=()):
        rates = []
        watch = make_plugin("watch", batch_end=lambda state: rates.append(
            state.optimizers["sgd"].param_groups[0]["lr"]
        ))  # fmt: skip
        state = (trainer := build(make, interval, [watch, *plugins])).state
        ((_, scheduler),) = state.schedulers[interval]
        if saved is not None:
            state.optimizers["sgd"].load_state_dict(saved[0])
            scheduler.load_state_dict(saved[1])
        trainer.fit(until)
        return rates, (state.optimizers["sgd"].state_dict(), scheduler.state_dict())

    return trained_rates


def plain_rates(make, interval):
    """What a person writes who knows when to step."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = make_optimizer(model)
    scheduler = make(optimizer)
    rates = []
    for step in range(NUM_STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        cross_entropy(model(torch.zeros(4, 3)), torch.zeros(4, dtype=torch.int64)).backward()
        optimizer.step()
        if interval == "ba" or step % STEPS_PER_EPOCH == STEPS_PER_EPOCH - 1:
            scheduler.step()
    return rates


def test_the_table_has_every_scheduler_of_torch():
    """One that a new version adds must be shown too."""
    classes = {
        name
        for name, one in vars(lr_scheduler).items()
        if isinstance(one, type) and issubclass(one, lr_scheduler.LRScheduler)
    }

    assert classes - OTHERS - WANTS_A_METRIC == MAKERS.keys()


@pytest.mark.sampled(12)
@pytest.mark.parametrize("interval", ["ba", "ep"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_20_steps_have_the_rates_of_a_plain_loop(make, interval, trained_rates):
    """Bit for bit, batch by batch and epoch by epoch."""
    rates, _ = trained_rates(make, interval)

    assert rates == plain_rates(make, interval)
    assert len(rates) == NUM_STEPS
    assert len(set(rates)) > 1


@pytest.mark.sampled(8)
@pytest.mark.parametrize("interval", ["ba", "ep"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_scheduler_that_is_loaded_goes_on_as_if_nothing_had_been(make, interval, trained_rates):
    """Halfway, into a trainer that is new."""
    before, saved = trained_rates(make, interval, until="2ep")

    after, _ = trained_rates(make, interval, until="2ep", saved=saved)

    assert before + after == plain_rates(make, interval)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_scheduler_that_is_a_step_ahead_would_be_seen(make, trained_rates, make_plugin):
    """Control: moved before the first batch, as a loop does that steps at the start."""

    def step_once(state):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of just this order
            state.schedulers["ba"][0][1].step()

    rates, _ = trained_rates(make, "ba", "3ep", plugins=[make_plugin(training_start=step_once)])

    assert rates != plain_rates(make, "ba")[:15]


ANSWERS = [
    ("total_steps", "4ep", "ba", 20),
    ("total_steps", "17ba", "ba", 17),
    ("total_steps", "1.5ep", "ba", 8),
    ("total_steps", "4ep", "ep", 4),
    ("total_steps", "2.5ep", "ep", 2),
    ("total_steps", "17ba", "ep", 3),
    ("total_steps", "3ba", "ep", 1),
    ("steps_per_epoch", "4ep", "ba", 5),
    ("steps_per_epoch", "90sec", "ep", 5),
    ("max_duration", "1e3tok", "ba", Time("1e3tok")),
]


@pytest.mark.parametrize(("name", "max_duration", "interval", "expected"), ANSWERS)
def test_a_function_is_told_what_it_asks_for(name, max_duration, interval, expected, build):
    """By the name of a parameter; `total_steps` is how often the scheduler will move."""
    told = []

    def make(optimizer, **asked):
        told.append(asked)
        return lr_scheduler.ConstantLR(optimizer)

    namespace = {"make": make}
    asking = eval(f"lambda optimizer, {name}: make(optimizer, {name}={name})", namespace)
    build(asking, interval, max_duration=max_duration)

    assert told == [{name: expected}]


def test_a_function_may_ask_for_the_state(build):
    """Where everything else is."""
    told = []
    trainer = build(lambda one, *, state: told.append(state) or lr_scheduler.ConstantLR(one))

    assert told == [trainer.state]


def test_what_has_a_value_is_not_asked_for(build):
    """Neither a default nor what `partial` has bound is replaced."""
    bound = partial(lr_scheduler.OneCycleLR, max_lr=0.5, total_steps=99)

    ((_, scheduler),) = build(bound).state.schedulers["ba"]

    assert scheduler.total_steps == 99


@pytest.mark.parametrize("interval", ["ba", "ep"])
def test_the_usual_case_is_one_line(interval, trained_rates):
    """No arithmetic with lengths, in either interval."""

    def make(optimizer, total_steps):
        return lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=total_steps)

    rates, _ = trained_rates(make, interval)

    num = NUM_STEPS if interval == "ba" else 4
    assert rates == plain_rates(partial(make, total_steps=num), interval)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (lambda optimizer, total_step: None, "requires the unknown argument 'total_step'; the closest"
         " is 'total_steps'; besides the optimizer, it can use max_duration, steps_per_epoch"),
        (schedules.cosine, r"Task\(scheduler=cosine\) takes no optimizer: call it, scheduler=cos"),
        (lambda: None, "takes no optimizer"),
    ],
)  # fmt: skip
def test_a_function_that_can_not_be_called_is_refused(scheduler, message, many, make_task):
    """With what it may name, or how to write it."""
    task = make_task(scheduler={"sgd": scheduler} if many else scheduler)

    with pytest.raises(TypeError, match=message):
        task.hooks()


@pytest.mark.parametrize("name", ["total_steps", "max_duration"])
def test_a_length_that_nobody_says_is_refused(name, build):
    """With the line to write."""
    asking = eval(f"lambda optimizer, {name}: None")

    with pytest.raises(SettingError, match=r"max_duration isn't set\n  fix .*=\"10ep\""):
        build(asking, max_duration=None)


@pytest.mark.parametrize("max_duration", ["1000tok", "90sec", "64sp"])
def test_a_length_that_is_not_in_steps_is_refused(max_duration, build):
    """The schedules of eventloop can be counted in it."""
    with pytest.raises(
        SettingError, match=rf"unknown with max_duration={max_duration[:2]}[^\n]*\n"
    ):
        build(lambda optimizer, total_steps: None, max_duration=max_duration)


class Endless(IterableDataset):
    """A data set without a length."""

    def __iter__(self):
        return iter([torch.zeros(3)])


@pytest.mark.parametrize(
    ("name", "max_duration", "interval"),
    [("steps_per_epoch", "20ba", "ba"), ("total_steps", "2ep", "ba"), ("total_steps", "9ba", "ep")],
)
def test_an_epoch_without_a_length_is_refused(name, max_duration, interval, build):
    """Only where it matters."""
    asking = eval(f"lambda optimizer, {name}: None")
    loader = DataLoader(Endless())

    with pytest.raises(TaskError, match=r"train data loader has no length\n  fix"):
        build(asking, interval, max_duration=max_duration, train_dataloader=loader)


def test_a_length_in_batches_needs_no_length_of_the_loader(build):
    """Control."""
    told = []

    def make(optimizer, total_steps):
        told.append(total_steps)
        return lr_scheduler.ConstantLR(optimizer)

    build(make, max_duration="9ba", train_dataloader=DataLoader(Endless()))

    assert told == [9]


def test_each_optimizer_has_a_scheduler_of_its_own(make_trainer, make_task):
    """By name, each with a function that asks for other things."""
    task = make_task(
        model=lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)),
        optimizer=lambda model: {"body": SGD(model[0].parameters(), lr=0.1),
                                 "head": SGD(model[1].parameters(), lr=1.0)},
        scheduler={"body": schedules.linear(),
                   "head": lambda one, total_steps: lr_scheduler.StepLR(one, total_steps - 1)},
    )  # fmt: skip
    trainer = make_trainer(task, max_duration="3ba")

    trainer.fit(until="2ba")

    rates = {name: one.param_groups[0]["lr"] for name, one in trainer.state.optimizers.items()}
    assert rates == pytest.approx({"body": 0.1 / 3, "head": 0.1})


def test_a_task_without_a_scheduler_has_no_hook_for_one():
    """Nothing is added to those who don't want it."""
    assert not hasattr(Task(model=nn.Linear(3, 3)).hooks(), "build_schedulers")


def test_a_scheduler_beyond_its_end_is_named(make_trainer, make_task):
    """Torch's own message doesn't tell whose it is."""
    task = make_task(
        scheduler=lambda optimizer, total_steps: lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.1, total_steps=total_steps
        )
    )
    trainer = make_trainer(task, max_duration="1ep")

    with pytest.raises(ValueError, match="Tried to step") as caught:
        trainer.fit(until="3ep")

    assert (
        "raised by the OneCycleLR of the optimizer 'sgd', which was created for a run of 1ep"
        in (caught.value.__notes__[0])
    )
