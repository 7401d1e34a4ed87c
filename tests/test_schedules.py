"""Schedules over `Time`: the learning rate of step n is the schedule's value n."""

from __future__ import annotations

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies
from torch import nn
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader, IterableDataset

from eventloop import schedules
from eventloop.clock import Clock
from eventloop.errors import SettingError, TaskError
from eventloop.run.differences import Allowed
from eventloop.task.schedule_curves import Course, Schedule
from eventloop_check import HostReads
from eventloop_testing import isolated_trainer, tiny_task

STEPS_PER_EPOCH = 5
NUM_STEPS = 20


@pytest.fixture
def build(make_trainer, make_task, make_batches):
    """Builds a trainer with this scheduler: 5 batches of 4 samples and 12 tokens an epoch."""

    def build(scheduler, max_duration="20ba", plugins=(), **given):
        values = {"scheduler": scheduler, "train_dataloader": make_batches(STEPS_PER_EPOCH),
                  "num_tokens": lambda inputs: inputs.numel()} | given  # fmt: skip
        return make_trainer(make_task(**values), max_duration=max_duration, algorithms=plugins)

    return build


@pytest.fixture
def rates_of(build, make_plugin):
    """Trains with this scheduler; gives the learning rate of each step."""

    def rates_of(scheduler, max_duration="20ba", until=None, plugins=(), **given):
        rates = []
        watch = make_plugin("watch", batch_end=lambda state: rates.append(rate_of(state)))
        build(scheduler, max_duration, [watch, *plugins], **given).fit(until)
        return rates

    return rates_of


def rate_of(state):
    return state.optimizers["sgd"].param_groups[0]["lr"]


def cosine(step, warmup=0, end=NUM_STEPS, final=0.0):
    """The rate of a step as the textbook has it, for an optimizer with the rate 0.1."""
    if step < warmup:
        return 0.1 * step / warmup
    angle = math.pi * min(1.0, (step - warmup) / (end - warmup))
    return 0.1 * (final + (1 - final) * (1 + math.cos(angle)) / 2)


def linear(step, warmup=0, end=NUM_STEPS, final=0.0):
    rise = step / warmup if warmup else 1.0
    fall = final + (1 - final) * max(0.0, (end - step) / (end - warmup))
    return 0.1 * (rise if step < warmup else fall)


def constant(step, warmup=0, cooldown=0):
    rise = step / warmup if warmup else 1.0
    fall = (NUM_STEPS - step) / cooldown if cooldown else 1.0
    return 0.1 * min(1.0, rise, fall)


def one_cycle(step, rise=6, start=0.04, final=4e-6):
    """Half a cosine up, half a cosine down."""
    if step < rise:
        return 0.1 * (1 - (1 - start) * (1 + math.cos(math.pi * step / rise)) / 2)
    done = (step - rise) / (NUM_STEPS - rise)
    return 0.1 * (final + (1 - final) * (1 + math.cos(math.pi * done)) / 2)


def wsd(step, warmup, decay, left, final=0.0):
    if step < NUM_STEPS - decay:
        return constant(step, warmup)
    done = (step - (NUM_STEPS - decay)) / decay
    return 0.1 * (final + (1 - final) * left(done))


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        (schedules.inverse_sqrt(warmup="4ba"), lambda n: 0.1 * min(n / 4, math.sqrt(4 / max(n, 1)))),
        (schedules.one_cycle(), one_cycle),
        (schedules.one_cycle(warmup="10ba", start_frac=0.5, final_frac=0.1),
         lambda n: one_cycle(n, 10, 0.5, 0.1)),
        (schedules.wsd(), lambda n: wsd(n, 0, 4, lambda done: 1 - done)),
        (schedules.wsd(warmup="2ba", decay="0.5dur", curve="sqrt", final_frac=0.1),
         lambda n: wsd(n, 2, 10, lambda done: 1 - math.sqrt(done), 0.1)),
        (schedules.wsd(warmup="2ba", decay="5ba", curve="cosine"),
         lambda n: wsd(n, 2, 5, lambda done: (1 + math.cos(math.pi * done)) / 2)),
        (schedules.cosine(), cosine),
        (schedules.cosine(warmup="4ba"), lambda n: cosine(n, 4)),
        (schedules.cosine(warmup="0.2dur", final_frac=0.1), lambda n: cosine(n, 4, final=0.1)),
        (schedules.cosine(duration="10ba", final_frac=0.2),
         lambda n: cosine(n, end=10, final=0.2)),
        (schedules.cosine(duration="40ba"), lambda n: cosine(n, end=40)),
        (schedules.cosine(warmup="0.075dur"), lambda n: cosine(n, 1.5)),
        (schedules.linear(), linear),
        (schedules.linear(warmup="1ep"), lambda n: linear(n, 5)),
        (schedules.linear(warmup="1ba", duration="3ep", final_frac=0.5),
         lambda n: linear(n, 1, 15, 0.5)),
        (schedules.linear(final_frac=1.0), lambda n: 0.1),
        (schedules.constant(), lambda n: 0.1),
        (schedules.constant(warmup="4ba"), lambda n: constant(n, 4)),
        (schedules.constant(cooldown="0.25dur"), lambda n: constant(n, 0, 5)),
        (schedules.constant(warmup="5ba", cooldown="15ba"), lambda n: constant(n, 5, 15)),
    ],
)  # fmt: skip
def test_the_rate_of_step_n_is_value_n(scheduler, expected, rates_of):
    """Closed forms at each step, the first at 0: nothing is off by one."""
    rates = rates_of(scheduler)

    assert rates == pytest.approx([expected(step) for step in range(NUM_STEPS)], rel=1e-12)


def test_a_schedule_that_is_off_by_one_would_be_seen(rates_of):
    """Control."""
    rates = rates_of(schedules.cosine(warmup="4ba"))

    assert rates != pytest.approx([cosine(step + 1, 4) for step in range(NUM_STEPS)], rel=1e-3)


@pytest.mark.parametrize("max_duration", ["20ba", "4ep", "80sp", "240tok"])
@pytest.mark.parametrize("warmup", ["0.3dur", "unit"])
def test_a_run_may_be_counted_in_any_unit(max_duration, warmup, rates_of):
    """5 batches an epoch, 4 samples and 12 tokens a batch; within an epoch the rate moves too."""
    own = {"20ba": "6ba", "4ep": "1.2ep", "80sp": "24sp", "240tok": "72tok"}
    warmup = own[max_duration] if warmup == "unit" else warmup

    rates = rates_of(schedules.cosine(warmup=warmup), max_duration)

    assert rates == pytest.approx([cosine(step, 6) for step in range(NUM_STEPS)], rel=1e-12)


@pytest.mark.parametrize(("warmup", "max_duration"), [("6ba", "4ep"), ("1.2ep", "20ba")])
def test_batches_and_epochs_may_be_mixed(warmup, max_duration, rates_of):
    """The data loader knows how many of one make the other."""
    rates = rates_of(schedules.cosine(warmup=warmup), max_duration)

    assert rates == pytest.approx([cosine(step, 6) for step in range(NUM_STEPS)], rel=1e-12)


def test_a_schedule_may_be_counted_in_seconds(build):
    """Of which the clock has counted 15 of 60 here."""
    trainer = build(schedules.linear(), "60sec")
    ((_, scheduler),) = trainer.state.schedulers["ba"]

    for _ in range(3):
        trainer.state.clock.end_batch(samples=4, tokens=12, seconds=5.0)
    scheduler.step()

    assert rate_of(trainer.state) == pytest.approx(0.075)


def test_a_schedule_may_move_once_an_epoch(rates_of):
    """It has the value of the epoch's start all through it."""
    rates = rates_of(schedules.cosine(), "4ep", scheduler_interval="ep")

    expected = [cosine(step // 5 * 5) for step in range(NUM_STEPS)]
    assert rates == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("max_duration", ["20ba", "4ep"])
def test_an_extended_run_does_not_bend_its_schedule(max_duration, rates_of):
    """`dur` is of the length that the run was started with; beyond it the end stays."""
    rates = rates_of(schedules.cosine(warmup="0.2dur", final_frac=0.1), max_duration, until="30ba")

    assert rates == pytest.approx([cosine(step, 4, final=0.1) for step in range(30)], rel=1e-12)
    assert rates[20:] == pytest.approx([0.01] * 10, rel=1e-12)


@pytest.mark.parametrize(
    ("scheduler", "until"), [(schedules.cosine(), "25ba"), (schedules.linear(duration="1ep"), None)]
)
def test_training_on_at_rate_0_is_warned_of_once(scheduler, until, rates_of):
    """It costs as much as any other, and changes nothing."""
    with pytest.warns(UserWarning, match="rate has been 0 since .* set final_frac") as caught:
        rates = rates_of(scheduler, "4ep", until=until)

    assert len(caught) == 1
    assert rates[-1] == rates[-2] == 0


def test_a_schedule_that_ends_with_the_run_warns_of_nothing(build):
    """Control: at its end the rate is 0, and no batch is trained with it; a warm-up starts at 0."""
    trainer = build(schedules.cosine(warmup="0.2dur"), "4ep")

    trainer.fit()

    assert rate_of(trainer.state) == 0


def test_a_step_that_is_left_out_leaves_the_rate_and_the_next_catches_up(rates_of, make_plugin):
    """The schedule ends where the run ends, whatever was skipped on the way."""
    skipper = make_plugin("skipper", should_skip_step=lambda state: state.clock.batch in (3, 4))

    rates = rates_of(schedules.linear(), plugins=[skipper])

    values = [linear(step) for step in range(NUM_STEPS)]
    expected = [*values[:4], values[3], values[3], *values[6:]]
    assert rates == pytest.approx(expected, rel=1e-12)


def test_an_epoch_that_ends_early_is_an_epoch(rates_of, make_plugin):
    """A schedule in epochs follows them; one batch goes by before it knows."""
    ender = make_plugin("ender", should_end_epoch=lambda state: state.clock.batch == 2)

    rates = rates_of(schedules.linear(), "4ep", plugins=[ender])

    expected = [linear(step) for step in (0, 1, 2, *range(6, 20))]
    assert rates == pytest.approx(expected, rel=1e-12)


def test_each_group_keeps_its_own_rate(build):
    """Their ratio stays, as with torch's schedulers."""

    def make_optimizer(model):
        return SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.01}], lr=0.1)

    trainer = build(schedules.linear(warmup="5ba"), optimizer=make_optimizer)
    optimizer = trainer.state.optimizers["sgd"]
    started_with = [group["lr"] for group in optimizer.param_groups]

    trainer.fit(until="15ba")

    assert started_with == [0.0, 0.0]
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1 / 3, 0.01 / 3])


def test_a_group_that_comes_later_starts_from_the_rate_it_came_with(build):
    """Layers that thaw in mid-run, say."""
    trainer = build(schedules.linear())
    optimizer = trainer.state.optimizers["sgd"]

    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 1.0})
    trainer.fit(until="10ba")

    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.5])


def test_a_rate_that_is_a_tensor_is_written_in_place(build):
    """A compiled or captured step reads it where it was."""
    rate = torch.tensor(0.1)
    trainer = build(schedules.linear(), optimizer=lambda model: SGD(model.parameters(), lr=rate))

    trainer.fit(until="10ba")

    assert rate_of(trainer.state) is rate
    torch.testing.assert_close(rate, torch.tensor(0.05))


def test_a_step_of_the_schedule_reads_nothing_from_the_device(build):
    """A rate that is a tensor is written, not read; to read it would be seen."""
    rate, found = torch.tensor(0.1), []
    trainer = build(schedules.linear(), optimizer=lambda model: SGD(model.parameters(), lr=rate))
    ((_, scheduler),) = trainer.state.schedulers["ba"]

    with HostReads(lambda tensor, how: found.append(how)):
        scheduler.step()
        reads_of_step = len(found)
        float(rate)

    assert (reads_of_step, len(found)) == (0, 1)


@pytest.mark.parametrize("max_duration", ["20ba", "4ep"])
def test_a_schedule_goes_on_where_it_was(max_duration, build):
    """Its state is JSON; a run of another length that takes it over keeps the first one's."""
    scheduler = schedules.cosine(warmup="0.2dur")
    first, second = build(scheduler, max_duration), build(scheduler, "8ep")
    ((_, saved),) = first.state.schedulers["ba"]
    ((_, loaded),) = second.state.schedulers["ba"]

    loaded.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    rates = []
    for step in range(NUM_STEPS):
        loaded.step()
        rates.append(rate_of(second.state))
        second.state.clock.end_batch(samples=4, tokens=12, seconds=1.0)
        if step % STEPS_PER_EPOCH == STEPS_PER_EPOCH - 1:
            second.state.clock.end_epoch()

    assert rates == pytest.approx([cosine(step, 4) for step in range(NUM_STEPS)], rel=1e-12)


@pytest.mark.parametrize(
    ("scheduler", "state"),
    [
        (
            schedules.wsd(warmup="2ba", curve="sqrt", final_frac=0.1),
            {"curve": "sqrt", "unit": "ba", "warmup": 2.0, "fall": 16.0, "end": 20.0}
            | {"final_frac": 0.1},
        ),
        (schedules.inverse_sqrt(warmup="4ba"),
         {"curve": "inverse_sqrt", "unit": "ba", "warmup": 4.0, "final_frac": 0.0}),
        (
            schedules.plateau("min test/loss", warmup="2ba"),
            {"course": {"curve": "linear", "unit": "ba", "warmup": 2.0, "final_frac": 0.0},
             "progress": {"best": math.inf, "num_bad": 0, "frac": 1.0, "batch": -1}},
        ),
    ],
)  # fmt: skip
def test_what_checkpoints_keep_of_a_schedule(scheduler, state, make_trainer):
    """Checkpoints of earlier versions hold it in this form."""
    task = tiny_task(scheduler=scheduler, settings={"eval_interval": "1ba"})
    ((_, made),) = make_trainer(task, max_duration="20ba").state.schedulers["ba"]

    assert made.state_dict() == state
    made.load_state_dict(state)
    assert made.state_dict() == state


@pytest.mark.parametrize(
    "state", [{"last_epoch": 3, "base_lrs": [0.1]}, {}, {"curve": "sine", "unit": "ba"}]
)
def test_the_state_of_another_scheduler_is_refused(state, build):
    """Whoever changed the task between two runs hears of it."""
    ((_, scheduler),) = build(schedules.cosine()).state.schedulers["ba"]

    with pytest.raises(TaskError, match=r"is none of eventloop.schedules\n  fix"):
        scheduler.load_state_dict(state)


def test_a_schedule_knows_its_optimizer_and_its_rates(build):
    """As torch's do."""
    trainer = build(schedules.linear())
    ((_, scheduler),) = trainer.state.schedulers["ba"]

    assert scheduler.optimizer is trainer.state.optimizers["sgd"]
    assert scheduler.get_last_lr() == [0.1]


lengths = strategies.floats(0.0, 1e6)


@given(*[lengths] * 3, strategies.floats(1e-6, 1e6), strategies.sampled_from(["cosine", "linear"]),
       strategies.floats(0.0, 1.0))  # fmt: skip
def test_a_rate_stays_between_0_and_the_optimizers(position, warmup, hold, decay, curve, final):
    """It rises, stays, falls, and ends where it should, whatever the lengths."""
    fall = warmup + hold
    course = Course(curve, "tok", warmup, fall, fall + decay, final)

    assert 0.0 <= course.factor(position) <= 1.0
    assert course.factor(course.end) == final
    assert course.factor(warmup) == 1.0 or hold + decay < 1e-3
    later = course.factor(position * 1.5)
    if position * 1.5 <= warmup:
        assert later >= course.factor(position)
    if position >= warmup:
        assert later <= course.factor(position) + 1e-12


@given(strategies.lists(strategies.integers(1, 1000), min_size=1, max_size=30))
def test_the_rate_depends_on_the_clock_alone(tokens):
    """Batches of any size, steps left out: what counts is where the clock is."""
    clock, optimizer = Clock(), SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    state = SimpleNamespace(clock=clock, num_batches=None, rank=0)
    scheduler = Schedule(optimizer, Course("linear", "tok", 0.0, 0.0, 10_000.0), state)

    for count in tokens:
        clock.end_batch(samples=1, tokens=count, seconds=1.0)
    scheduler.step()

    expected = 0.1 * max(0.0, 1 - sum(tokens) / 10_000)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (schedules.cosine(warmup="21ba"), "warmup=21ba leaves nothing of a schedule.* at 20ba"),
        (schedules.linear(warmup="1dur"), "warmup=1dur leaves nothing"),
        (schedules.linear(warmup="5ba", duration="1ep"), "warmup=5ba leaves nothing.* at 1ep"),
        (schedules.cosine(warmup="25ba", duration="40ba"), "warmup=25ba leaves nothing.* at 20ba"),
        (schedules.constant(warmup="5ep"), "warmup=5ep leaves nothing.* at 4ep"),
        (schedules.constant(warmup="0.6dur", cooldown="0.6dur"),
         "warmup=0.6dur and cooldown=0.6dur leave nothing"),
        (schedules.constant(cooldown="21ba"), "cooldown=21ba leaves nothing"),
        (schedules.cosine(warmup="100tok"), "warmup=100tok can't be compared.* counted in batches"),
        (schedules.constant(cooldown="9sp"), "cooldown=9sp can't be compared"),
    ],
)  # fmt: skip
def test_times_that_do_not_fit_are_refused_when_the_trainer_is_built(scheduler, message, build):
    """Not when the warm-up turns out to have no end."""
    with pytest.raises(SettingError, match=rf"{message}[^\n]*\n  fix"):
        build(scheduler)


@pytest.mark.parametrize(
    "make",
    [
        schedules.cosine,
        schedules.linear,
        schedules.constant,
        schedules.wsd,
        schedules.one_cycle,
        schedules.inverse_sqrt,
    ],
)
@pytest.mark.parametrize("warmup", ["5 epochs", "0ba", "2dur"])
def test_what_is_no_time_is_refused_where_it_is_written(make, warmup):
    """With what was meant, as everywhere."""
    with pytest.raises(
        ValueError, match=r"is not a time|isn't a finite number|more than the whole"
    ):
        make(warmup=warmup)


@pytest.mark.parametrize("final_frac", [-0.1, 1.1, float("nan")])
def test_a_share_is_between_0_and_1(final_frac):
    """Ten per cent is 0.1."""
    with pytest.raises(ValueError, match=f"final_frac={final_frac} is outside 0 to 1"):
        schedules.cosine(final_frac=final_frac)


def test_a_schedule_of_the_run_needs_its_length(build):
    """`fit(until=...)` says how far to go, not how long the run is."""
    with pytest.raises(SettingError, match="max_duration isn't set"):
        build(schedules.cosine(), max_duration=None)


def test_an_inverse_square_root_needs_no_length(rates_of):
    """It goes on falling, however long the run is."""
    rates = rates_of(schedules.inverse_sqrt(warmup="1ba"), max_duration=None, until="9ba")

    assert rates == pytest.approx([0.0, *(0.1 / math.sqrt(step) for step in range(1, 9))])


def test_a_decay_has_a_curve_that_is_known():
    """A misspelt one would train for hours before it falls."""
    with pytest.raises(ValueError, match="curve='exp' is none of 'linear', 'cosine', 'sqrt'"):
        schedules.wsd(curve="exp")
    with pytest.raises(ValueError, match="start_frac=2 is outside 0 to 1"):
        schedules.one_cycle(start_frac=2)


DOWN_TO_0 = {
    "LambdaLR": lambda one: lr_scheduler.LambdaLR(one, lambda step: max(0.0, 1 - step / 3)),
    "PolynomialLR": lambda one: lr_scheduler.PolynomialLR(one, total_iters=3),
    "CosineAnnealingLR": lambda one: lr_scheduler.CosineAnnealingLR(one, T_max=3),
}


@pytest.mark.parametrize("kind", DOWN_TO_0)
def test_a_longer_run_at_rates_of_0_is_warned_of_whatever_made_them(kind, tmp_path):
    """It would train for nothing; in another process, and in the same one."""
    said = f"resumes at batch 3 with learning rates of 0 by {kind}: training has no effect"

    def build(duration):
        task = tiny_task(scheduler=DOWN_TO_0[kind])
        given = {"max_duration": duration, "checkpoint_interval": "1ba"}
        return isolated_trainer(tmp_path, task, allowed=Allowed(config_change=True), **given)

    with build("3ba") as trainer:
        trainer.fit()
        with pytest.warns(UserWarning, match=said):
            trainer.fit(until="4ba")
    shutil.rmtree(tmp_path / "run")
    with build("3ba") as trainer:
        trainer.fit()
    with build("6ba") as trainer, pytest.warns(UserWarning, match=said):
        trainer.fit()


def test_a_schedule_of_eventloop_warns_itself(tmp_path):
    """Once, after a batch that was trained at 0; at the resume nothing is said beside it."""

    def build(duration):
        task = tiny_task(scheduler=schedules.linear(duration="3ba"))
        given = {"max_duration": duration, "checkpoint_interval": "1ba"}
        return isolated_trainer(tmp_path, task, allowed=Allowed(config_change=True), **given)

    with build("3ba") as trainer:
        trainer.fit()
    with (
        build("6ba") as trainer,
        pytest.warns(UserWarning, match="rate has been 0 since") as warned,
    ):
        trainer.fit()

    assert len(warned) == 1


def test_a_longer_run_at_other_rates_is_not_warned_of(tmp_path):
    """Control, with every warning an error: one group of two that is frozen at 0, too."""
    task = tiny_task(
        optimizer=lambda model: SGD(
            [{"params": [one], "lr": 0.1 * (idx > 0)} for idx, one in enumerate(model.parameters())]
        ),
        scheduler=lambda one: lr_scheduler.StepLR(one, 2),
    )
    with isolated_trainer(tmp_path, task, max_duration="3ba") as trainer:
        trainer.fit()
        trainer.fit(until="6ba")


def test_a_schedule_that_never_ends_needs_no_length(rates_of):
    """Control."""
    rates = rates_of(schedules.constant(warmup="4ba"), max_duration=None, until="6ba")

    assert rates == pytest.approx([constant(step, 4) for step in range(6)])


class Endless(IterableDataset):
    """A data set without a length."""

    def __iter__(self):
        for _ in range(STEPS_PER_EPOCH):
            yield torch.zeros(3), torch.tensor(0)


def test_a_schedule_in_epochs_needs_to_know_how_long_one_is(build):
    """It moves within the epoch; a data loader without a length doesn't know how far."""
    with pytest.raises(TaskError, match="the train data loader has no length"):
        build(schedules.cosine(), "4ep", train_dataloader=DataLoader(Endless()))


def test_a_schedule_in_samples_needs_no_length_of_the_loader(rates_of):
    """Control."""
    rates = rates_of(schedules.linear(), "20sp", train_dataloader=DataLoader(Endless(), 2))

    assert rates == pytest.approx([0.1, 0.09, 0.08, 0.075, 0.065, 0.055, 0.05, 0.04, 0.03, 0.025,
                                   0.015, 0.005])  # fmt: skip


def test_a_schedule_in_tokens_needs_a_count_of_tokens(build):
    """The rate would never move."""
    trainer = build(schedules.constant(warmup="10tok"), num_tokens=None)

    with pytest.raises(
        SettingError, match="the schedule of 'sgd' is counted in tokens, but tokens"
    ):
        trainer.fit()
