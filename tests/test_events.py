"""Hookspecs and the real loop tell one order, and every hook has its contract."""

from __future__ import annotations

import re

import pytest

from eventloop import actions, events
from eventloop.errors import TaskError
from eventloop.events import EVENTS
from eventloop.plugin.declared_hooks import HOOKS

LINES = {
    "event": ["Fires", "State", "May", "Must not"],
    "question": ["Asked", "Answer"],
    "collection": ["Asked", "State", "Answer", "Must not"],
    "action": ["Asked"],
}
# Only what is not a moment of its own: of numbers and checkpoints one hears when they have arrived.
AT_ANY_TIME = {"log", "log_text", "checkpoint_saved", "exception", "close"}
CLOSERS = {name: hook.closes for name, hook in EVENTS.items() if hook.closes}


def first_calls(names: list[str]) -> list[str]:
    return list(dict.fromkeys(names))


@pytest.fixture
def whole_run(make_trainer, make_task, make_batches, make_plugin, tmp_path):
    """Does everything a trainer does, with a plugin, on a run that ended early, and fails at last."""

    def whole_run(plugin):
        task = make_task(eval_dataloaders=make_batches())
        given = {"max_duration": "2ep", "eval_interval": "1ba", "run_dir": tmp_path / "run"}
        ends_early = make_plugin(batch_start=lambda state: 1 / state.clock.batch)
        with make_trainer(task, callbacks=[ends_early], **given) as trainer:
            with pytest.raises(ZeroDivisionError):
                trainer.fit()
        writer = make_plugin("writer", batch_end=lambda state: state.log_text("said", "text"))
        with make_trainer(task, algorithms=[plugin], callbacks=[writer], **given) as trainer:
            trainer.fit()
            trainer.predict(make_batches())
            with pytest.raises(TaskError):
                trainer.predict([])

    return whole_run


def test_the_real_loop_fires_in_the_order_of_the_hookspecs(whole_run, make_recorder):
    """Who reads the list of events reads the loop."""
    recorder = make_recorder()

    whole_run(recorder)

    expected = [event for event in EVENTS if event not in AT_ANY_TIME]
    assert [one for one in first_calls(recorder.seen) if one not in AT_ANY_TIME] == expected
    assert set(recorder.seen) >= AT_ANY_TIME


def test_events_and_questions_come_in_the_order_of_their_declaration(whole_run, make_recorder):
    """In the second epoch, where every question is asked."""
    recorder = make_recorder(events.EVENTS_AND_QUESTIONS)

    whole_run(recorder)

    begins, ends = (
        [idx for idx, one in enumerate(recorder.seen) if one == name]
        for name in ("should_rebuild_dataloader", "fit_end")
    )
    second_epoch = first_calls(recorder.seen[begins[0] : ends[0]])
    declared = [
        name for name in events.EVENTS_AND_QUESTIONS if name in {*second_epoch} - AT_ANY_TIME
    ]
    assert [name for name in second_epoch if name not in AT_ANY_TIME] == declared
    assert {one for one in events.EVENTS_AND_QUESTIONS if one.startswith("should_")} <= set(
        second_epoch
    )


def test_what_plugins_say_about_themselves_is_asked_outside_of_fits(make_trainer, make_recorder):
    """Whether one can be used, once, with the first batch at hand; its note, with the header."""
    recorder = make_recorder(events.EVENTS_AND_QUESTIONS)

    trainer = make_trainer(algorithms=[recorder], max_duration="1ep")
    built = [*recorder.seen]
    trainer.fit()
    fitted = recorder.seen[len(built) :]
    assert trainer.notes is not None

    assert built == ["init", "unsuitable", "after_load"]
    assert not {"unsuitable", "header_note"} & {*fitted}
    assert recorder.seen[-1] == "header_note"


@pytest.mark.parametrize("per", ["fit", "epoch", "batch", "microbatch"])
def test_an_event_fires_as_often_as_it_says(per, whole_run, make_recorder):
    """2 epochs of 3 batches, each in one piece; `per` is what people plan with."""
    recorder = make_recorder()
    expected = {"fit": 1, "epoch": 2, "batch": 6, "microbatch": 6}[per]

    whole_run(recorder)

    counts = {one: recorder.seen.count(one) for one in EVENTS if EVENTS[one].per == per}
    assert counts == dict.fromkeys(counts, expected)


def test_the_two_of_a_pair_fire_as_often_as_each_other_says():
    """What opens an epoch is closed once an epoch."""
    for event, opener in CLOSERS.items():
        assert EVENTS[event].per == EVENTS[opener].per


def test_the_pairs_are_those_of_the_design():
    """Their closers run in reverse: first in, last out."""
    around = ["train_batch", "forward", "loss", "backward"]
    spans = ["batch", "epoch", "fit", "training", "eval", "eval_batch", "predict", "predict_batch"]

    expected = {f"before_{name}": f"after_{name}" for name in around}
    expected |= {f"{name}_start": f"{name}_end" for name in spans}
    assert {opener: closer for closer, opener in CLOSERS.items()} == expected


def test_a_pair_fires_equally_often(whole_run, make_recorder):
    """But for what fails in the middle."""
    recorder = make_recorder()

    whole_run(recorder)

    counts = {one: recorder.seen.count(one) for one in EVENTS}
    counts["predict_start"] -= 1  # the last prediction of `whole_run` failed
    assert [one for one, opener in CLOSERS.items() if counts[one] != counts[opener]] == []


@pytest.mark.parametrize("name", HOOKS)
def test_every_contract_has_its_lines(name):
    """A plugin author reads the same lines everywhere, and finds nothing missing."""
    hook = HOOKS[name]
    summary, *rest = hook.doc.split("\n\n")

    labels = re.findall(r"^([A-Z][a-z ]+):(?: |$)", "\n".join(rest), re.MULTILINE)
    required = LINES[hook.kind]
    assert summary.endswith(".")
    assert "\n" not in summary
    assert labels[: len(required)] == required
    assert set(labels[len(required) :]) <= {"Default", "Args", "Raises"}


@pytest.mark.parametrize("name", HOOKS)
def test_a_summary_says_what_kind_of_hook_it_is(name):
    """Events tell, questions ask, actions do."""
    hook = HOOKS[name]
    begins = {"event": "Called ", "question": "Asks whether ", "collection": "Asks each plugin "}

    assert hook.doc.startswith(begins.get(hook.kind, ""))
    assert hook.argnames[0] == "state"
    assert (hook.kind == "question") == name.startswith("should_")


def test_events_questions_and_actions_are_told_apart():
    """By name and `firstresult`, so that a spec can't be both."""
    kinds = {hook.kind for hook in events.EVENTS_AND_QUESTIONS.values()}
    assert kinds == {"event", "question", "collection"}
    assert {hook.kind for hook in actions.ACTIONS.values()} == {"action"}
    assert not events.EVENTS_AND_QUESTIONS.keys() & actions.ACTIONS.keys()
