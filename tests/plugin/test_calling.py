"""Wrappers: what they enclose, may ask for again, and have to return."""

from __future__ import annotations

import inspect
from contextlib import suppress

import pytest

from eventloop.errors import PluginError


class Wrong(Exception):
    """What plugins raise here."""


def core_forward(state):
    return "core's"


def line_of(function) -> str:
    return f"{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}"


def test_a_wrapper_around_nothing_receives_an_empty_list(plan_of, plugin, state):
    """It may add to what it receives, whether anybody else listens or not."""

    def adds(state):
        return [*(yield), True]

    plan = plan_of("should_stop", plugin("p", should_stop=(adds, {"wrapper": True})))

    assert plan(state) is True


@pytest.mark.parametrize("result", [True, ["yes"], (True,)])
def test_a_wrapper_of_a_question_returns_a_list_of_answers(plan_of, plugin, state, result):
    """It stands for what it encloses."""

    def replaces(state):
        yield
        return result

    plan = plan_of("should_stop", plugin("odd", should_stop=(replaces, {"wrapper": True})))

    with pytest.raises(PluginError, match=r"not a list of results\n  plugin  odd\n"):
        plan(state)


@pytest.mark.parametrize(("hook", "kind"), [("forward", "action"), ("should_stop", "question")])
def test_a_wrapper_that_forgets_to_return_is_told_by_name(plan_of, plugin, state, hook, kind):
    """A `yield` without `return` is the commonest slip, and loses the result."""

    def forgets(state):
        result = yield
        result = None
        return result

    core = plugin("core", "core", **{hook: lambda state: True})
    plan = plan_of(hook, core, plugin("ema", **{hook: (forgets, {"wrapper": True})}))

    with pytest.raises(PluginError) as caught:
        plan(state)

    assert str(caught.value) == (
        f"the wrapper of the {kind} {hook} returned nothing\n"
        "  plugin  ema\n"
        f"  at      {line_of(forgets)}\n"
        "  fix     return the result of `yield`"
    )


def test_a_conditional_wrapper_may_leave_nothing(plan_of, plugin, state):
    """The rule is for those who promise a result."""

    def empties(state):
        yield

    core = plugin("core", "core", forward=core_forward)
    options = {"wrapper": True, "conditional": True}

    assert plan_of("forward", core, plugin("p", forward=(empties, options)))(state) is None


# Once more


def test_again_runs_what_the_wrapper_encloses(plan_of, plugin, state):
    """A loss over two targets is the same loss, asked twice."""

    def interpolates(state):
        first = yield
        state.outputs = 10
        return first + state.again()

    core = plugin("core", "core", forward=lambda state: state.outputs)
    state.outputs = 1

    plan = plan_of("forward", core, plugin("p", forward=(interpolates, {"wrapper": True})))

    assert plan(state) == 11


def test_again_may_be_asked_before_the_first_time(plan_of, plugin, state):
    """Sharpness-aware methods look ahead, then go."""

    def looks_ahead(state):
        before = state.again()
        return before, (yield)

    core = plugin("core", "core", forward=core_forward)
    plan = plan_of("forward", core, plugin("p", forward=(looks_ahead, {"wrapper": True})))

    assert plan(state) == ("core's", "core's")


def test_again_is_each_wrappers_own(plan_of, plugin, state):
    """The outer one repeats the inner one too, the inner one only what it encloses."""
    calls = []

    def twice(name):
        def wrapper(state):
            calls.append(name)
            return [*(yield), *state.again()]

        return wrapper, {"wrapper": True}

    core = plugin("core", "core", forward=lambda state: [calls.append("core")])
    outer, inner = plugin("a", forward=twice("a")), plugin("b", forward=twice("b"))

    assert plan_of("forward", core, outer, inner)(state) == [None] * 4
    assert calls == ["a", "b", "core", "core", "b", "core", "core"]


def test_again_passes_what_the_hook_passed(plan_of, plugin, state):
    """Actions have arguments of their own."""

    def twice(state):
        return (yield) + state.again()

    core = plugin("core", "core", backward=lambda state, loss: loss)
    plan = plan_of("backward", core, plugin("p", backward=(twice, {"wrapper": True})))

    assert plan(state, 3) == 6


def test_again_may_pass_something_else(plan_of, plugin, state):
    """A part of the batch is counted as the whole would be; wrappers further in see the part."""
    seen = []

    def halves(state, loss):
        yield
        return state.again(loss / 2)

    def watches(state, loss):
        seen.append(loss)
        return (yield)

    core = plugin("core", "core", backward=lambda state, loss: loss)
    outer = plugin("a", backward=(halves, {"wrapper": True}))
    inner = plugin("b", backward=(watches, {"wrapper": True}))

    assert plan_of("backward", core, outer, inner)(state, 6) == 3
    assert seen == [6, 3]


def test_again_is_over_where_the_wrapper_ends(plan_of, plugin, state):
    """Also where it ends with an exception; `again` of a loss inside an event would be a riddle."""

    def raises(state):
        yield
        raise Wrong

    core = plugin("core", "core", forward=core_forward)
    plan = plan_of("forward", core, plugin("p", forward=(raises, {"wrapper": True})))

    with pytest.raises(Wrong):
        plan(state)
    with pytest.raises(PluginError, match=r"works inside a wrapper of an action only"):
        state.again()


@pytest.mark.parametrize("asked", ["first", "again"])
def test_again_is_not_there_for_what_the_wrapper_encloses(plan_of, plugin, state, asked):
    """It would ask for itself, without end: the first time as well as the second."""
    heard = []

    def twice(state):
        yield
        return state.again()

    def forward(state):
        heard.append("forward")
        return state.again() if len(heard) == (1 if asked == "first" else 2) else 1

    core = plugin("core", "core", forward=forward)
    plan = plan_of("forward", core, plugin("p", forward=(twice, {"wrapper": True})))

    with pytest.raises(PluginError, match=r"works inside a wrapper of an action only"):
        plan(state)
    assert heard == ["forward"] * (1 if asked == "first" else 2)


def test_again_is_not_there_in_what_the_wrapper_calls_in_turn(plan_of, plugin, state):
    """The wrapper of an event would repeat the action around it, which isn't what it encloses."""

    def asks(state):
        state.again()
        yield

    event = plan_of("log", plugin("q", log=(asks, {"wrapper": True})))

    def tells(state):
        event(state, {}, None)
        return (yield)

    core = plugin("core", "core", forward=core_forward)
    plan = plan_of("forward", core, plugin("p", forward=(tells, {"wrapper": True})))

    with pytest.raises(PluginError, match=r"works inside a wrapper of an action only"):
        plan(state)


# Wrappers that break the protocol


def test_a_wrapper_that_does_not_yield_is_told_by_name(plan_of, plugin, state):
    """What it should enclose would never run."""

    def never(state):
        if state is None:
            yield
        return 1

    core = plugin("core", "core", forward=core_forward)
    plan = plan_of("forward", core, plugin("ema", forward=(never, {"wrapper": True})))

    with pytest.raises(PluginError, match=r"a wrapper didn't yield\n  wrapper  ema, forward"):
        plan(state)


@pytest.mark.parametrize("fails", [False, True])
def test_a_wrapper_that_yields_twice_is_told_and_closed(plan_of, plugin, state, fails):
    """After a result as after an exception; what it holds open must be released."""
    closed = []

    def twice():
        with suppress(Wrong):
            yield
        try:
            yield
        finally:
            closed.append(True)

    def wrapper(state):
        yield from twice()
        return 1

    def forward(state):
        if fails:
            raise Wrong
        return 1

    core = plugin("core", "core", forward=forward)
    plan = plan_of("forward", core, plugin("ema", forward=(wrapper, {"wrapper": True})))

    with pytest.raises(PluginError, match=r"yielded a second time\n  wrapper  ema, forward"):
        plan(state)
    assert closed == [True]
