"""A callback that raises can be left out, and the run goes on as if it had never been there."""

from __future__ import annotations

import sys

import pytest
import torch

from eventloop import hookimpl
from eventloop.events import EVENTS

BROKEN = "is switched off for the rest of this run because it raised"


@pytest.fixture
def weights(make_trainer, make_task, make_batches):
    """Trains for two epochs with `on_callback_error="disable"`; gives the weights."""

    def weights(*callbacks, **given):
        trainer = make_trainer(
            make_task(eval_dataloaders=make_batches()),
            callbacks=callbacks,
            **{"max_duration": "2ep", "on_callback_error": "disable"} | given,
        )
        trainer.fit()
        trainer.close()
        return trainer.state.model.state_dict()

    return weights


class Failing:
    """Raises where it is told, and lists what it is called for."""

    name = "failing"

    def __init__(self, where):
        self.where = where
        self.seen = []

    def act(self, moment):
        self.seen.append(moment)
        if moment == self.where:
            raise ValueError("disk full")

    @hookimpl
    def batch_start(self):
        self.act("batch_start")

    @hookimpl(wrapper=True)
    def before_forward(self):
        self.act("first half")
        result = yield
        self.act("second half")
        return result

    @hookimpl
    def should_stop(self):
        self.act("should_stop")

    @hookimpl
    def log(self, numbers, at):
        self.act("log")

    @hookimpl
    def close(self):
        self.act("close")


MOMENTS = ["batch_start", "first half", "second half", "should_stop", "log", "close"]


@pytest.mark.parametrize("where", MOMENTS)
def test_the_run_goes_on_bit_by_bit(where, weights):
    """Ten hours of training aren't worth less because a disk is full."""
    failing = Failing(where)

    with pytest.warns(UserWarning, match=BROKEN) as caught:
        actual = weights(failing)

    expected = weights()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in actual.items())
    assert len(caught) == 1
    assert failing.seen.count(where) == 1
    if where != "close":
        assert failing.seen.index("close") == len(failing.seen) - 1 == failing.seen.index(where) + 1


def test_the_warning_names_the_culprit(weights):
    """As the note on an exception would."""
    with pytest.warns(UserWarning, match=BROKEN) as caught:
        weights(Failing("should_stop"))

    message = str(caught[0].message)
    assert "failing (Trainer(callbacks=...)) is switched off" in message
    assert "raised ValueError in should_stop, epoch 1, batch 1, rank 0: disk full" in message
    assert f"at   {__file__}" in message


def test_by_default_the_run_fails(weights):
    """Control: a broken callback isn't overlooked unless somebody says so."""
    with pytest.raises(ValueError, match="disk full"):
        weights(Failing("batch_start"), on_callback_error="raise")


def test_an_algorithm_always_fails_the_run(make_trainer, make_plugin):
    """Without it, another model would be trained."""
    bad = make_plugin("bad", batch_end=lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        make_trainer(algorithms=[bad], on_callback_error="disable").fit()


def test_somebody_elses_exception_is_not_the_callbacks(make_trainer, make_plugin):
    """It passes through the callback's wrapper on its way out, and nobody is switched off."""
    failing = Failing("nowhere")
    bad = make_plugin("bad", before_forward=lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        make_trainer(algorithms=[bad], callbacks=[failing], on_callback_error="disable").fit()


def test_a_callback_that_exits_is_switched_off_like_one_that_raises(weights, make_plugin):
    """`sys.exit(0)` in a library that it calls mustn't end the run as if it were done."""
    bad = make_plugin("bad", batch_start=lambda: sys.exit(0))

    with pytest.warns(UserWarning, match="it raised SystemExit in batch_start"):
        weights(bad)


def test_one_that_fails_again_at_close_is_not_switched_off_again(weights, make_plugin):
    """It is off for good; but what is lost at the end is worth a word."""
    bad = make_plugin("bad", batch_start=lambda: 1 / 0, close=lambda: 1 / 0)

    with pytest.warns(UserWarning, match="ZeroDivisionError") as caught:
        weights(bad)

    first, second = (str(one.message) for one in caught)
    assert "is switched off for the rest of this run" in first
    assert "is off, and raised again: ZeroDivisionError in close" in second


def test_an_interrupt_is_no_failure(make_trainer, make_plugin):
    """Ctrl-C ends the run, whose code it ever hits."""

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_trainer(
            callbacks=[make_plugin("slow", batch_end=interrupt)], on_callback_error="disable"
        ).fit()


@pytest.mark.sampled(15)
@pytest.mark.parametrize(
    "event", [one for one in EVENTS if one not in ("before_load", "exception")]
)
def test_any_event_may_fail(event, weights, make_plugin, make_trainer, make_batches, tmp_path):
    """Wherever it is, from the trainer's constructor to its end."""
    texts = make_plugin("texts", batch_end=lambda state: state.log_text("said", "a text"))
    bad = make_plugin("bad", **{event: lambda: 1 / 0})

    if event.startswith("predict"):
        trainer = make_trainer(callbacks=[bad], on_callback_error="disable")
        with pytest.warns(UserWarning, match=f"ZeroDivisionError in {event}"):
            trainer.predict(make_batches())
    else:
        with pytest.warns(UserWarning, match=f"ZeroDivisionError in {event}"):
            weights(texts, bad, run_dir=tmp_path / "run")
