"""Whoever raises, wherever: the note says who, everybody is told, everything is closed."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from torchmetrics.classification import MulticlassAccuracy

from eventloop import hookimpl
from eventloop.errors import TaskError
from eventloop.hook_markers import OF_ITSELF
from eventloop.plugin.declared_hooks import HOOKS

# What has to do with checkpoints, second models, texts and headers, of which these runs have none.
NOT_ASKED = {"before_load", "restore_optimizers", "capture_optimizers", "checkpoint_saved",
             "select_weights", "wrap_companion", "log_text", "header_note"}  # fmt: skip
TOLD_AFTER_ALL = {"exception", "close"}
FORMS = ("plain", "first half", "second half")
CASES = [
    (hook, form)
    for hook in HOOKS
    for form in FORMS
    if hook not in NOT_ASKED and (form == "plain" or hook not in (*TOLD_AFTER_ALL, *OF_ITSELF))
]
CODE = """
from eventloop import hookimpl

class Boom(Exception):
    pass

class Plugin:
    has_raised = False

    def fail(self, state):
        self.has_raised = True
        raise Boom(f"epoch {{state.clock.epoch_number}}, batch {{state.clock.batch}}")

    @hookimpl(wrapper={wrapper})
    def {hook}({args}):
{body}
"""
BODY = {
    "plain": "self.fail(state)",
    "first half": "if not self.has_raised: self.fail(state)\n        return (yield)",
    "second half": "result = yield\n        self.fail(state)\n        return result",
}

# From taking a batch to its last default: what fails there fails in the batch that comes next.
WITHIN_BATCH = {
    *("before_dataloader", "count_batch", "after_dataloader", "batch_start", "should_skip_batch"),
    *("train_batch", "before_train_batch", "split_batch", "before_forward", "forward"),
    *("after_forward", "before_loss", "loss", "after_loss", "before_backward", "backward"),
    *("after_backward", "clip_gradients", "after_train_batch", "should_skip_step"),
    *("optimizer_step", "zero_grad"),
}


@pytest.fixture
def make_bad(install):
    """Installs a plugin that raises in one hook, and gives an instance of it."""

    def make_bad(hook: str, form: str) -> object:
        args = ", ".join(["self", *HOOKS[hook].argnames])
        body = f"        {BODY[form]}"
        code = CODE.format(hook=hook, wrapper=form != "plain", args=args, body=body)
        install("bad", code, version="1.2.3")
        return importlib.import_module("eventloop_bad_module").Plugin()

    return make_bad


class Asks:
    """Makes the loop do what it does only when it is asked."""

    @hookimpl
    def should_checkpoint(self):
        return True

    @hookimpl(conditional=True, trylast=True)
    def save_checkpoint(self):
        return Path("nowhere")


@pytest.fixture
def whole_run(make_trainer, make_task, make_batches, clean):
    """Does everything that a trainer does, with some plugins; fails at last."""

    def whole_run(*plugins, callbacks=(), **given):
        batches = make_batches()
        task = make_task(
            eval_dataloaders=batches,
            metrics={"accuracy": MulticlassAccuracy(3)},
        )
        settings = {"max_duration": "2ep", "log_interval": "1ba"} | given
        with make_trainer(
            task, algorithms=[*plugins, Asks()], callbacks=callbacks, **settings
        ) as trainer:
            trainer.fit()
            trainer.predict(batches)
            trainer.load_weights(trainer.export(clean / "model.safetensors"))
            trainer.predict([])

    return whole_run


@pytest.mark.sampled(18)
@pytest.mark.parametrize(("hook", "form"), CASES)
def test_the_culprit_is_named_and_everybody_is_told(hook, form, whole_run, make_bad, make_recorder):
    """A run with twenty plugins is only bearable when a failure has a name."""
    recorders = [make_recorder(TOLD_AFTER_ALL, name=name) for name in ("a", "z", "watch")]

    with pytest.raises(Exception) as caught:  # noqa: PT011
        whole_run(make_bad(hook, form), *recorders[:2], callbacks=recorders[2:])

    error, text = caught.value, "\n".join([str(caught.value), *caught.value.__notes__])
    where = re.search(r"(?m)^epoch \d+, batch \d+|Boom: (epoch \d+, batch \d+)", text)
    moment = where[1] or where[0]
    if hook in WITHIN_BATCH:  # the clock counts the batches that are done
        moment = "epoch 1, batch 1"
    if hook == "epoch_start":
        moment = "epoch 1, batch 0"
    assert f"raised by plugin bad (eventloop-bad 1.2.3) in {hook}, {moment}, rank 0" in text
    assert "fix  correct the plugin's code at " in text
    assert "/eventloop_bad_module.py:" in text.partition("  fix  ")[2]
    assert text.count("raised by plugin") == 1
    expected = TaskError if hook in TOLD_AFTER_ALL else "Boom"
    assert expected in (type(error), type(error).__name__)
    assert [recorder.seen for recorder in recorders] == [["exception", "close"]] * 3


def test_what_is_left_out_is_what_nothing_asks_for(whole_run, make_recorder):
    """A hook that the loop begins to ask for joins the day it does."""
    recorders = [make_recorder([hook for hook in HOOKS if HOOKS[hook].kind != "action"])]
    asked = set()

    class Wraps:
        name = "wraps"

    for hook in [name for name in HOOKS if HOOKS[name].kind == "action"]:
        setattr(Wraps, hook, hookimpl(wrapper=True)(_noting(hook, asked)))

    with pytest.raises(TaskError):
        whole_run(*recorders, Wraps())

    assert set(HOOKS) - asked - set(recorders[0].seen) == NOT_ASKED


def _noting(hook, asked):
    def note(self):
        asked.add(hook)
        return (yield)

    return note


def test_a_failure_while_closing_does_not_hide_the_first(make_trainer, make_plugin):
    """At the end of a `with`, the exception under way is what the caller is told."""

    def fail(what):
        raise OSError(what)

    bad = make_plugin("bad", batch_end=lambda: fail("cause"), close=lambda: fail("disk full"))

    with pytest.raises(OSError, match="cause") as caught, make_trainer(callbacks=[bad]) as trainer:
        trainer.fit()

    notes = "\n".join(caught.value.__notes__)
    assert "then also: OSError: disk full" in notes
    assert "raised by plugin bad (Trainer(callbacks=...)) in close" in notes
    assert "Traceback" in notes
