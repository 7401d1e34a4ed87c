"""A schedule that follows a metric: torch's rule, saved, and alike on all ranks."""

from __future__ import annotations

import math
import os
import warnings

import pytest
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from eventloop import CheckpointError, SettingError, schedules
from eventloop.run.differences import Allowed
from eventloop_testing import isolated_trainer, run_ranks, tiny_batches, tiny_task

VALUES = (5.0, 4.0, 4.0, 3.9999, 4.1, 3.0, 3.1, math.nan, 3.2, 3.3, 3.3, 2.0, 2.5, 2.5, 2.5, 2.5)


class Scripted(Metric):
    """Gives one value after the other, by the batch at which it is asked."""

    higher_is_better = False

    def __init__(self, values, sign=1.0, shift=0.0):
        super().__init__()
        self.values, self.sign, self.shift = values, sign, shift
        self.add_state("num", torch.zeros(()), dist_reduce_fx=None)
        self.batch = None

    def update(self, *_):
        pass

    def compute(self):
        return torch.tensor(self.sign * self.values[self.batch()] + self.shift)


def fit(folder, values=VALUES, untils=(None,), metric="test/error", shift=0.0, **given):
    """Trains a batch for each value, with an evaluation after each; returns rates by batch."""
    rates = {}
    for until in untils:
        script = Scripted(values, -1.0 if metric.startswith("max") else 1.0, shift)
        task = tiny_task(
            metrics={"error": script},
            scheduler=schedules.plateau(metric=metric, patience=1, factor=0.5, **given),
        )
        settings = {
            "max_duration": f"{len(values)}ba",
            "eval_interval": "1ba",
            "checkpoint_interval": "1ba",
        }
        with isolated_trainer(
            folder, task, allowed=Allowed(config_change=True), **settings
        ) as trainer:
            state = trainer.state
            state.metrics["eval/test"]["error"].batch = lambda state=state: state.clock.batch - 1
            for batch in range(state.clock.batch + 1, len(values) + 1):
                if until is not None and batch > until:
                    break
                trainer.fit(until=f"{batch}ba")
                rates[batch] = state.optimizers["sgd"].param_groups[0]["lr"]
    return list(rates.values())


@pytest.mark.parametrize("direction", ["", "min ", "max "])
def test_the_rule_is_torchs(tmp_path, direction):
    """After each evaluation the rate is that of ReduceLROnPlateau."""
    sign = -1.0 if direction == "max " else 1.0
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    rule = lr_scheduler.ReduceLROnPlateau(
        optimizer, "max" if sign < 0 else "min", factor=0.5, patience=1
    )
    expected = []
    for value in VALUES:
        # torch's margin is a share of a value with its sign, which ours isn't.
        rule.step(sign * value if sign > 0 else 100.0 - value)
        expected.append(optimizer.param_groups[0]["lr"])

    shift = 0.0 if sign > 0 else 100.0
    actual = fit(tmp_path, metric=f"{direction}test/error", shift=shift)

    assert actual == pytest.approx(expected, rel=1e-12)
    assert len(set(actual)) > 3


def test_the_rate_rises_first_and_never_falls_below_its_end(tmp_path):
    """Warm-up and plateau are one schedule; from the evaluation on the next batch has the new rate."""
    rates = fit(tmp_path, (1.0,) * 12, warmup="4ba", final_frac=0.2)

    # As of the batch that comes next; a first bad evaluation is put up with, a second isn't.
    assert rates == pytest.approx(
        [0.025, 0.05, 0.0375, 0.05, 0.025, 0.025, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02]
    )


def test_a_run_that_was_stopped_goes_on_as_one_that_was_not(tmp_path):
    """What it has seen of the metric is in the checkpoint."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = fit(tmp_path / "whole")

        assert fit(tmp_path / "stopped", untils=(3, 4, 9, None)) == expected


@pytest.mark.nightly
def test_without_what_was_saved_it_would_go_on_otherwise(tmp_path, monkeypatch):
    """Control."""
    expected = fit(tmp_path / "whole")
    monkeypatch.setattr(
        "eventloop.task.schedule_curves.Schedule.load_state_dict", lambda self, state: None
    )

    assert fit(tmp_path / "stopped", untils=(7, None)) != expected


@pytest.mark.nightly
def test_ranks_whose_values_differ_have_the_rates_of_the_first(tmp_path):
    """A metric that isn't reduced may differ by rank; the weights must not."""

    def on_ranks():
        is_other = os.environ["RANK"] == "1"
        return fit(tmp_path / "ranks", VALUES[::-1] if is_other else VALUES)

    one, other = run_ranks(on_ranks)

    assert one == other == fit(tmp_path / "alone")


def test_a_metric_that_is_not_there_is_refused_when_the_trainer_is_built(tmp_path):
    """After hours it would be too late."""

    def build(metric, **settings):
        task = tiny_task(
            metrics={"accuracy": MulticlassAccuracy(3)},
            scheduler=schedules.plateau(metric=metric),
        )
        isolated_trainer(tmp_path, task, **settings)

    with pytest.raises(
        SettingError, match=r"schedules.plateau: no metric is named .*closest is 'test/accuracy'"
    ):
        build("test/acuracy")
    with pytest.raises(SettingError, match="follows 'test/accuracy', but eval_interval is not set"):
        build("test/accuracy", eval_interval=None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"factor": 1.0}, "factor=1.0 is outside 0 to 1"),
        ({"patience": -1}, "patience=-1 is not a number of evaluations"),
        ({"patience": 2.5}, "patience=2.5 is not a number"),
        ({"threshold": -0.1}, "threshold=-0.1 is not a share"),
        ({"final_frac": 1.5}, "final_frac=1.5 is outside 0 to 1"),
        ({"warmup": "soon"}, "'soon' is not a time"),
    ],
)
def test_what_makes_no_sense_is_refused(given, words):
    """Where it is written."""
    with pytest.raises(ValueError, match=words):
        schedules.plateau(metric="test/error", **given)


@pytest.mark.parametrize(
    "progress",
    [
        {"best": "5", "num_bad": 0, "frac": 1.0, "batch": 1},
        {"best": 5.0, "num_bad": 0.5, "frac": 1.0, "batch": 1},
        {"best": 5.0, "num_bad": 0, "frac": 7.0, "batch": 1},
        {"best": 5.0, "more": 0},
    ],
)
def test_a_progress_that_no_run_had_is_refused(tmp_path, progress):
    """A checkpoint may come from anywhere; what it holds is checked."""
    task = tiny_task(
        train_dataloader=tiny_batches(), scheduler=schedules.plateau(metric="test/accuracy")
    )
    with isolated_trainer(tmp_path, task) as trainer:
        ((_, scheduler),) = trainer.state.schedulers["ba"]
        saved = {**scheduler.state_dict(), "progress": progress}

        with pytest.raises((ValueError, TypeError, CheckpointError)):
            scheduler.load_state_dict(saved)


def test_a_metric_is_named_as_the_documents_do(make_trainer, make_task, make_batches):
    """`schedules.plateau("val/loss")` follows the loss of the eval set `val`."""
    schedule = schedules.plateau("val/loss", patience=0, factor=0.5, threshold=10.0)
    task = make_task(eval_dataloaders={"val": make_batches()}, scheduler=schedule)
    trainer = make_trainer(task, max_duration="3ep")

    trainer.fit()

    (optimizer,) = trainer.state.optimizers.values()
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**2
