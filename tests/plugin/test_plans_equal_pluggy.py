"""Plans mean what pluggy means: the same calls, results and exceptions, for whatever is registered.

The reference is pluggy itself: a manager for one hook, in which the implementations are registered
in reverse order of the plan, with their phases erased. An implementation is drawn as data, and
made twice, each with a log of its own: once for the plan, once for pluggy, which gives everybody
the State, so that a callback's takes the view itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pluggy
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from eventloop.errors import PluginError
from eventloop.hook_markers import OF_ITSELF, Hook
from eventloop.plugin.declared_hooks import HOOKS
from eventloop.plugin.observe import Around, observe, with_context
from eventloop.plugin.order import Implementation, order, order_of_owners
from eventloop.plugin.plans import Plan, freeze
from eventloop.plugin.records import Plugin
from eventloop.state import State
from eventloop.view import ReadOnlyState

HOOK_NAMES = ("batch_end", "log", "should_stop", "forward", "clip_gradients", "optimizer_step")
MARKER = "reference"
PASS, CHANGE, RAISE = "pass", "change", "raise"


class Odd(BaseException):
    """An exception that `except Exception` doesn't see."""


ERRORS = (ValueError, KeyError, StopIteration, RuntimeError, KeyboardInterrupt, GeneratorExit, Odd)


@dataclass(frozen=True)
class Drawn:
    """What one implementation does.

    Args:
        value: what a plain one returns, and what a wrapper puts in place of a result.
        error: what it raises where it raises; None in a plain one that returns.
        setup, after_result, after_error: what a wrapper does at each of its moments.
    """

    role: str
    phase: int
    argnames: tuple[str, ...]
    wrapper: bool
    logs: bool
    value: Any = None
    error: type[BaseException] | None = None
    setup: str = PASS
    after_result: str = PASS
    after_error: str = PASS


@dataclass
class Side:
    """One of the two that are compared: what its implementations saw, and what they raised."""

    state: State
    log: list[Any] = field(default_factory=list)
    raised: dict[str, BaseException] = field(default_factory=dict)

    def describe(self, thing: Any) -> Any:
        """Returns a stand-in for what may differ between the sides, and only for that."""
        if isinstance(thing, ReadOnlyState):
            assert thing.clock is self.state.clock
            return "view"
        if thing is self.state:
            return "state"
        if isinstance(thing, BaseException):
            known = [label for label, error in self.raised.items() if error is thing]
            cause = None if thing.__cause__ is None else self.describe(thing.__cause__)
            return type(thing), thing.args, known, cause
        return list(thing) if isinstance(thing, list) else thing


class Acting:
    """One implementation at work on one side."""

    def __init__(self, drawn: Drawn, name: str, side: Side, see: Callable[[Any], Any]) -> None:
        self.drawn, self.name, self.side, self.see = drawn, name, side, see

    def note(self, moment: str, *seen: Any) -> None:
        self.side.log.append((self.name, moment, *map(self.side.describe, seen)))

    def fail(self, moment: str) -> None:
        error = self.drawn.error(f"{self.name} {moment}")
        self.side.raised[f"{self.name} {moment}"] = error
        raise error

    def plain(self, *args: Any) -> Any:
        self.note("call", *map(self.see, args))
        if self.drawn.error is not None:
            self.fail("call")
        return self.drawn.value

    def setup(self, *args: Any) -> None:
        self.note("setup", *map(self.see, args))
        if self.drawn.setup == RAISE:
            self.fail("setup")

    def result(self, result: Any) -> Any:
        self.note("result", result)
        if self.drawn.after_result == RAISE:
            self.fail("result")
        if self.drawn.after_result == PASS:
            return result
        return [*result, *self.drawn.value] if isinstance(result, list) else self.drawn.value

    def failed(self, error: BaseException) -> Any:
        self.note("failed", error)
        if self.drawn.after_error == RAISE:
            self.fail("failed")
        # A callback that swallows an exception is an error of ours, with a test of its own.
        if self.drawn.after_error == PASS or self.drawn.role == "callback":
            raise error
        return self.drawn.value


PLAIN = "def function({0}): return acting.plain({0})"
WRAPPER = """
def function({0}):
    acting.setup({0})
    try:
        result = yield
    except BaseException as error:
        return acting.failed(error)
    return acting.result(result)
"""


def function_of(acting: Acting) -> Callable[..., Any]:
    """Returns a function with the drawn signature, since pluggy passes by parameter names."""
    source = WRAPPER if acting.drawn.wrapper else PLAIN
    scope = {"acting": acting}
    exec(source.format(", ".join(acting.drawn.argnames)), scope)
    return scope["function"]


def name_of(idx: int) -> str:
    return f"p{(idx * 7) % 10}{idx}"


def implementations_of(hook: Hook, all_drawn: Sequence[Drawn], side: Side) -> list[Implementation]:
    """Makes the implementations that the plan is frozen from."""
    made = []
    for idx, drawn in enumerate(all_drawn):
        name = name_of(idx)
        may_pass = drawn.wrapper or drawn.value is None or bool(idx % 2)
        made.append(
            Implementation(
                plugin=Plugin(name, drawn.role, object()),
                hook=hook,
                function=function_of(Acting(drawn, name, side, see=lambda seen: seen)),
                argnames=drawn.argnames,
                phase=drawn.phase,
                wrapper=drawn.wrapper,
                conditional=hook.kind == "action" and may_pass,
                logs=drawn.logs,
            )
        )
    return made


def reference_of(hook: Hook, all_drawn: Sequence[Drawn], side: Side) -> Callable[..., Any]:
    """Registers the same with pluggy, the last to be called first."""
    namespace: dict[str, Any] = {}
    exec(f"def {hook.name}({', '.join(hook.argnames)}): ...", namespace)
    spec = pluggy.HookspecMarker(MARKER)(namespace[hook.name], firstresult=hook.kind == "action")
    manager = pluggy.PluginManager(MARKER)
    manager.add_hookspecs(SimpleNamespace(**{hook.name: spec}))
    mark = pluggy.HookimplMarker(MARKER)
    by_name = {name_of(idx): drawn for idx, drawn in enumerate(all_drawn)}
    for one in reversed(plan_order(hook, implementations_of(hook, all_drawn, side))):
        name = one.plugin.name
        drawn = by_name[name]
        acting = Acting(drawn, name, side, see=view_of(side) if drawn.role == "callback" else same)
        function = mark(function_of(acting), wrapper=drawn.wrapper)
        manager.register(SimpleNamespace(**{hook.name: function}), name)
    return getattr(manager.hook, hook.name)


def plan_order(hook: Hook, found: Sequence[Implementation]) -> list[Implementation]:
    """Returns the order of calls: an action asks the plugins before the task and the core."""
    ordered = order(found)
    if hook.kind != "action":
        return list(ordered)
    plain = order_of_owners(one for one in ordered if not one.wrapper)
    return [*(one for one in ordered if one.wrapper), *plain]


def same(seen: Any) -> Any:
    return seen


def view_of(side: Side) -> Callable[[Any], Any]:
    return lambda seen: ReadOnlyState(seen, "") if seen is side.state else seen


def outcome_of(call: Callable[[], Any], side: Side) -> Any:
    try:
        result = call()
    except BaseException as error:
        return "raised", side.describe(error)
    return "returned", result


def planned_outcome(hook: Hook, plan: Plan, args: dict[str, Any], side: Side) -> Any:
    """Returns what the plan does, in the words of pluggy where the design has others.

    Nobody who answers is an error.
    """
    kind, what = outcome_of(lambda: plan(*args.values()), side)
    if kind == "raised" and what[0] is PluginError:
        assert what[1][0].startswith(f"no plugin answered the action {hook.name}\n")
        return "returned", None
    return kind, what


def without_result(outcome: Any) -> Any:
    """Returns the outcome of an event: what it returns is ignored, unless a wrapper receives it."""
    return "returned" if outcome[0] == "returned" else outcome


def compare(hook: Hook, all_drawn: Sequence[Drawn], new_state: Any, freezer: Any = freeze) -> None:
    """Asserts that plan and pluggy do the same."""
    state = new_state()
    rest = {name: object() for name in hook.argnames if name != "state"}
    args = {"state": state, **rest}
    ours, theirs = Side(state), Side(state)
    found = implementations_of(hook, all_drawn, ours)
    plan = freezer(hook, order(found), state)
    reference = reference_of(hook, all_drawn, theirs)

    actual = planned_outcome(hook, plan, args, ours)
    expected = outcome_of(lambda: reference(**args), theirs)
    if hook.kind == "question" and expected[0] == "returned":
        actual, expected = (actual[0], bool(actual[1])), ("returned", any(expected[1]))
    if hook.kind == "event" and not any(one.wrapper for one in all_drawn):
        actual, expected = without_result(actual), without_result(expected)

    assert actual == expected
    assert ours.log == theirs.log
    assert outcome_of(state.again, ours)[1][0] is PluginError  # no wrapper is under way any more


def drawn_implementations(hook: Hook) -> st.SearchStrategy[list[Drawn]]:
    """Draws what up to six plugins do with a hook."""
    roles = ["task", "algorithm", "core"] + ["callback"] * 2 * (hook.kind != "action")
    errors = st.sampled_from(ERRORS)
    answers = {
        "event": st.none(),  # anything else is an error, which has a test of its own
        "question": st.sampled_from([None, True, False]),
        "action": st.sampled_from([None, None, 0, False, "", "done"]),
    }[hook.kind]
    in_place = answers if hook.kind == "action" else st.lists(st.booleans(), max_size=2)
    if hook.kind == "event":
        in_place = st.just([])
    shared = {
        "role": st.sampled_from(roles),
        "phase": st.integers(0, 2),
        "argnames": st.sampled_from(
            [
                names
                for size in range(len(hook.argnames) + 1)
                for names in itertools.permutations(hook.argnames, size)
            ]
        ),
        "logs": st.booleans(),
    }
    plain = st.builds(
        Drawn,
        **shared,
        wrapper=st.just(False),
        value=answers,
        error=st.one_of(st.none(), st.none(), st.none(), errors),
    )
    wrapper = st.builds(
        Drawn,
        **shared,
        wrapper=st.just(True),
        value=in_place,
        error=errors,
        setup=st.sampled_from([PASS] * 5 + [RAISE]),
        after_result=st.sampled_from([PASS, PASS, CHANGE, RAISE]),
        after_error=st.sampled_from([PASS, CHANGE, RAISE]),
    )
    return st.lists(st.one_of(plain, plain, wrapper), max_size=6)


DRAWN = st.sampled_from(HOOK_NAMES).flatmap(
    lambda name: st.tuples(st.just(HOOKS[name]), drawn_implementations(HOOKS[name]))
)
SETTINGS = settings(
    max_examples=800,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@settings(SETTINGS, max_examples=200)
@given(DRAWN)
def test_plans_equal_pluggy(new_state, drawn):
    """Whoever knows pluggy knows what a hook does; being equal is the licence for having plans."""
    compare(*drawn, new_state)


@pytest.mark.nightly
@SETTINGS
@given(DRAWN)
def test_more_plans_equal_pluggy(new_state, drawn):
    """Four times as many sets of implementations."""
    compare(*drawn, new_state)


def freeze_watched(hook, found, state):
    return freeze(
        hook, observe(found, [Halves(), Around(lambda plugin, hook, state: nullcontext())]), state
    )


class Halves:
    """An observer that enters something around each half of a wrapper."""

    def observed(self, one):
        return with_context(one, lambda state: nullcontext(), in_halves=True)


@pytest.mark.nightly
@SETTINGS
@given(DRAWN)
def test_watched_plans_equal_pluggy(new_state, drawn):
    """Whoever watches a run with --check or a trace sees the run that they would have had."""
    hook, all_drawn = drawn
    assume(len(all_drawn) != 1 or all_drawn[0].role != "core")  # its function is the plan

    compare(hook, all_drawn, new_state, freezer=freeze_watched)


def reverse(hook, found, state):
    return freeze(hook, list(order(found))[::-1], state)


def leave_out_wrappers(hook, found, state):
    return freeze(hook, [one for one in found if not one.wrapper], state)


def turn_wrappers_inside_out(hook, found, state):
    wrappers = [one for one in found if one.wrapper]
    return freeze(hook, [*[one for one in found if not one.wrapper], *wrappers[::-1]], state)


def keep_the_phases_of_one_role_from_another(hook, found, state):
    return freeze(hook, sorted(found, key=lambda one: one.phase), state)


def give_callbacks_the_state(hook, found, state):
    promoted = replace(Plugin("x", "algorithm", object()))
    return freeze(
        hook,
        [replace(one, plugin=promoted) if one.plugin.role == "callback" else one for one in found],
        state,
    )


def pass_in_the_order_of_the_hook(hook, found, state):
    return freeze(
        hook,
        [
            replace(one, argnames=tuple(sorted(one.argnames, key=hook.argnames.index)))
            for one in found
        ],
        state,
    )


def swallow(hook, found, state):
    plan = freeze(hook, found, state)

    def quiet(*args: Any) -> Any:
        try:
            return plan(*args)
        except Exception:
            return None

    return quiet


def raise_another(hook, found, state):
    plan = freeze(hook, found, state)

    def translated(*args: Any) -> Any:
        try:
            return plan(*args)
        except ValueError as error:
            raise ValueError(*error.args) from None

    return translated


def call_twice(hook, found, state):
    plan = freeze(hook, found, state)
    return lambda *args: (plan(*args), plan(*args))[0]


@pytest.mark.parametrize(
    "wrong",
    [
        reverse,
        leave_out_wrappers,
        turn_wrappers_inside_out,
        keep_the_phases_of_one_role_from_another,
        give_callbacks_the_state,
        pass_in_the_order_of_the_hook,
        swallow,
        raise_another,
        call_twice,
    ],
)
def test_the_comparison_finds_a_wrong_plan(new_state, wrong):
    """A property that holds for everything says nothing."""

    @settings(SETTINGS, phases=[Phase.generate], report_multiple_bugs=False)
    @given(DRAWN)
    def compare_with_wrong(drawn):
        compare(*drawn, new_state, freezer=wrong)

    with pytest.raises(AssertionError):
        compare_with_wrong()


def test_every_kind_of_hook_and_every_number_of_arguments_is_drawn():
    """The comparison is worth what it covers."""
    drawn = [HOOKS[name] for name in HOOK_NAMES]

    compared = [hook for name, hook in HOOKS.items() if name not in OF_ITSELF]
    assert {hook.kind for hook in drawn} == {hook.kind for hook in compared}
    assert {len(hook.argnames) for hook in drawn} == {len(one.argnames) for one in HOOKS.values()}
