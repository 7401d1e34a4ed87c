"""Observers change nothing but what they are there for."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest

from eventloop import hookimpl
from eventloop.plugin.declared_hooks import HOOKS
from eventloop.plugin.observe import Around, observe, with_context
from eventloop.plugin.order import Implementation
from eventloop.plugin.plans import freeze
from eventloop.plugin.records import Plugin
from eventloop_check import Check

AROUND = Around(lambda plugin, hook, state: nullcontext())


class Notes:
    """An observer that writes down when it is entered and left."""

    def __init__(self, in_halves):
        self.in_halves = in_halves
        self.log = []

    def observed(self, one):
        return with_context(one, lambda state: self.noted(one), in_halves=self.in_halves)

    @contextmanager
    def noted(self, one):
        self.log.append(f"{one.plugin.name} in")
        try:
            yield
        finally:
            self.log.append(f"{one.plugin.name} out")


def implementation(name, hook, function, *argnames, wrapper=False, role="algorithm"):
    plugin = Plugin(name, role, object(), "eventloop-test", "1.0")
    return Implementation(plugin, HOOKS[hook], function, argnames, wrapper=wrapper)


@pytest.mark.parametrize(
    ("in_halves", "expected"),
    [
        (False, ["around in", "inner in", "inner out", "around out"]),
        (True, ["around in", "around out", "inner in", "inner out", "around in", "around out"]),
    ],
)
def test_a_wrapper_is_watched_whole_or_in_halves(in_halves, expected, state):
    """A trace wants all of it, a check only its own code."""

    def around():
        return (yield) + 1

    given = [
        implementation("around", "forward", around, wrapper=True),
        implementation("inner", "forward", lambda: 1),
    ]
    notes = Notes(in_halves)

    result = freeze(HOOKS["forward"], observe(given, [notes]), state)(state)

    assert result == 2
    assert notes.log == expected


def test_arguments_arrive_whatever_their_order(state):
    """A plan passes by position; an implementation takes what it names."""
    seen = []
    given = implementation(
        "a", "log", lambda at, state, numbers: seen.append((at, state, numbers)),
        "at", "state", "numbers",
    )  # fmt: skip

    freeze(HOOKS["log"], observe([given], [Notes(True), Notes(False)]), state)(state, {}, "now")

    assert seen == [("now", state, {})]


def test_a_failure_is_noted_once_and_where_it_was_written(state):
    """However many observers stand around it."""

    def fail():
        raise KeyError("oops")

    given = implementation("bad", "batch_end", fail)
    plan = freeze(HOOKS["batch_end"], observe([given], [Check(), AROUND, AROUND]), state)

    with pytest.raises(KeyError, match="oops") as caught:
        plan(state)

    (note,) = caught.value.__notes__
    assert "raised by plugin bad (eventloop-test 1.0) in batch_end, epoch 1, batch 0" in note
    assert f"at   {__file__}:{fail.__code__.co_firstlineno}" in note


@pytest.mark.parametrize("observers", [[], [AROUND, Check()]], ids=["off", "on"])
def test_a_wrapper_may_run_again_what_it_encloses(observers, make_trainer, make_plugin):
    """`state.again()` belongs to the wrapper under way, watched or not."""
    called = []

    class Twice:
        @hookimpl(wrapper=True)
        def loss(self, state):
            result = yield
            state.again()
            return result

    inner = make_plugin("inner", loss=lambda state: called.append(1) or state.outputs.sum())
    make_trainer(algorithms=[Twice(), inner], observers=observers).fit()

    assert len(called) == 6


def test_without_observers_nothing_is_put_around(state):
    """Off, they cost nothing: the very same functions are frozen."""
    given = implementation("a", "batch_end", lambda: None)

    assert observe([given], []) == (given,)


def test_a_plugin_may_enter_a_context_around_each_call(make_trainer, make_plugin):
    """A tracer is installed like any other plugin; whatever is called, it is inside."""
    inside = []

    class Watch:
        @contextmanager
        def around_calls(self, plugin, hook, state):
            inside.append((plugin, hook))
            yield
            inside.remove((plugin, hook))

        @hookimpl
        def close(self): ...

    seen = []
    other = make_plugin("other", batch_end=lambda: seen.append(list(inside)))
    make_trainer(algorithms=[other], callbacks=[Watch()], max_duration="1ba").fit()

    assert seen == [[("other", "batch_end")]]
    assert inside == []
