"""Hooks that plugins declare mean what pluggy means, for programs of several hooks that call each other.

A program is drawn as data: the hooks, what each plugin does when one is called, and the calls. It is
made twice: as plugins of a run, assembled, ordered and frozen as always and called as `state.call` does,
and with pluggy's manager, in which the implementations are registered in the reverse of our order. Both
keep a log of what was called with what. Where the design means something else than pluggy, the
reference says so in one place, `as_designed`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pluggy
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from eventloop.errors import PluginError
from eventloop.hook_markers import hookimpl, hookspec
from eventloop.plugin.declared_hooks import checked
from eventloop.plugin.order import order_of_owners
from eventloop.plugin.plans import freeze
from eventloop.plugin.records import Plugin
from eventloop.plugin.registry import Registry, arrange
from eventloop.state import State

KINDS = ("event", "question", "action", "collection")
NAMES = {kind: ("should_h{}" if kind == "question" else "h{}") for kind in KINDS}
ARGUMENTS = ("a", "b", "c")
ERRORS = (ValueError, KeyError, StopIteration, KeyboardInterrupt)
PASS, CHANGE, RAISE, CALL = "pass", "change", "raise", "call"


@dataclass(frozen=True)
class DrawnHook:
    """A declaration: its arguments, the last of which have defaults."""

    kind: str
    idx: int
    num_args: int
    num_defaults: int

    @property
    def name(self) -> str:
        return NAMES[self.kind].format(self.idx)

    @property
    def parameters(self) -> str:
        names = ARGUMENTS[: self.num_args]
        first = self.num_args - min(self.num_defaults, self.num_args)
        return ", ".join(
            ["state", *names[:first], *(f"{name}='{name}0'" for name in names[first:])]
        )

    @property
    def required(self) -> tuple[str, ...]:
        return ARGUMENTS[: self.num_args - min(self.num_defaults, self.num_args)]


@dataclass(frozen=True)
class DrawnImpl:
    """What one plugin does when one hook is called.

    Args:
        takes: idxs of the hook's arguments, `state` being 0, in its own order.
        num_own: how many of the last have defaults of the implementation's own.
        acts: what a plain one does; what a wrapper does before, after a result, after an exception.
        value: what it returns, or puts in the place of a result.
        calls: the idx of the hook that it calls where it calls.
    """

    hook_idx: int
    takes: tuple[int, ...]
    num_own: int
    phase: str
    wrapper: bool
    conditional: bool
    acts: tuple[str, str, str]
    value: Any
    error: type[BaseException]
    calls: int


@dataclass(frozen=True)
class Program:
    """Hooks, plugins and calls.

    Args:
        plugins: of each, its role and its implementations, one a hook at most.
        calls: of each, the hook's idx, how many arguments come by position, and whether those
            with defaults are passed, too.
    """

    hooks: tuple[DrawnHook, ...]
    plugins: tuple[tuple[str, tuple[DrawnImpl, ...]], ...]
    calls: tuple[tuple[int, int, bool], ...]


@st.composite
def programs(draw: Callable[[Any], Any]) -> Program:
    hooks = tuple(
        DrawnHook(kind, idx, draw(st.integers(0, 3)), draw(st.integers(0, 2)))
        for idx, kind in enumerate(draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3)))
    )
    plugins = []
    for _ in range(draw(st.integers(0, 5))):
        kinds = {hook.kind for hook in hooks}
        role = draw(
            st.sampled_from(["algorithm"] if "action" in kinds else ["algorithm", "callback"])
        )
        idxs = draw(st.sets(st.integers(0, len(hooks) - 1), min_size=1))
        plugins.append((role, tuple(draw(implementations(hooks, idx)) for idx in sorted(idxs))))
    one_call = st.tuples(st.integers(0, len(hooks) - 1), st.integers(0, 3), st.booleans())
    return Program(hooks, tuple(plugins), tuple(draw(st.lists(one_call, min_size=1, max_size=3))))


def implementations(hooks: tuple[DrawnHook, ...], idx: int) -> st.SearchStrategy[DrawnImpl]:
    hook = hooks[idx]
    values = {
        "event": st.none(),
        "question": st.sampled_from([None, True, False]),
        "action": st.sampled_from([None, 0, "", "done"]),
        "collection": st.sampled_from([None, 0, "", "term"]),
    }[hook.kind]
    orders = [
        order
        for size in range(hook.num_args + 2)
        for order in itertools.permutations(range(hook.num_args + 1), size)
    ]
    return st.builds(
        DrawnImpl,
        hook_idx=st.just(idx),
        takes=st.sampled_from(orders),
        num_own=st.integers(0, 2),
        phase=st.sampled_from(["", "", "tryfirst", "trylast"]),
        wrapper=st.sampled_from([False, False, True]),
        conditional=st.booleans(),
        acts=st.tuples(
            st.sampled_from([PASS, PASS, PASS, RAISE, CALL]),
            st.sampled_from([PASS, PASS, CHANGE, RAISE]),
            st.sampled_from([PASS, PASS, CHANGE, RAISE]),
        ),
        value=values,
        error=st.sampled_from(ERRORS),
        # Later hooks alone, so that calls end.
        calls=st.integers(idx + 1, len(hooks)),
    )


@dataclass
class Side:
    """One of the two: how it calls a hook, and what was seen."""

    hooks: tuple[DrawnHook, ...]
    call: Callable[..., Any] = lambda name, **given: None
    log: list[Any] = field(default_factory=list)

    def describe(self, thing: Any) -> Any:
        if isinstance(thing, PluginError):
            return PluginError, thing.what
        if isinstance(thing, BaseException):
            return type(thing), thing.args
        return "state" if type(thing).__name__ in ("State", "ReadOnlyState") else repr(thing)

    def call_next(self, idx: int) -> None:
        if idx < len(self.hooks):
            hook = self.hooks[idx]
            given = {name: name.upper() for name in hook.required}
            self.log.append(("got", hook.name, self.call(hook.name, **given)))


class Acting:
    """One implementation at work on one side."""

    def __init__(self, drawn: DrawnImpl, kind: str, role: str, label: str, side: Side) -> None:
        self.drawn, self.kind, self.label, self.side = drawn, kind, label, side
        self.may_swallow = role != "callback"

    def act(self, moment: int, *seen: Any) -> bool:
        """Whether the result is to be changed."""
        self.side.log.append((self.label, moment, *map(self.side.describe, seen)))
        what = self.drawn.acts[moment]
        if what == RAISE:
            raise self.drawn.error(self.label, moment)
        if what == CALL:
            self.side.call_next(self.drawn.calls)
        return what == CHANGE

    def plain(self, *args: Any) -> Any:
        self.act(0, *args)
        return self.drawn.value

    def result(self, result: Any) -> Any:
        return self.changed(result) if self.act(1, result) else result

    def failed(self, error: BaseException) -> Any:
        # A callback that swallows an exception is an error of ours, with a test of its own.
        if not self.act(2, error) or not self.may_swallow:
            raise error
        return self.changed(None)

    def changed(self, result: Any) -> Any:
        if self.kind == "action":
            return "changed"
        value = [] if self.kind == "event" or self.drawn.value is None else [self.drawn.value]
        return [*(result or []), *value]


PLAIN = "def {0}({1}): return acting.plain({2})"
WRAPPER = """
def {0}({1}):
    acting.act(0, {2})
    try:
        result = yield
    except BaseException as error:
        return acting.failed(error)
    return acting.result(result)
"""


def function_of(acting: Acting, hook: DrawnHook) -> Callable[..., Any]:
    """Returns a function with the drawn signature, since both sides pass by parameter names."""
    drawn = acting.drawn
    names = [("state", *ARGUMENTS)[idx] for idx in drawn.takes]
    first = len(names) - min(drawn.num_own, len(names))
    parameters = [*names[:first], *(f"{name}='own'" for name in names[first:])]
    scope = {"acting": acting}
    source = WRAPPER if drawn.wrapper else PLAIN
    exec(source.format(hook.name, ", ".join(parameters), ", ".join(names)), scope)
    return scope[hook.name]


def specs_of(hooks: tuple[DrawnHook, ...], mark: Callable[[DrawnHook], Any]) -> type:
    made = {}
    for hook in hooks:
        scope: dict[str, Any] = {}
        exec(f"def {hook.name}({hook.parameters}): 'Is drawn.'", scope)
        made[hook.name] = staticmethod(mark(hook)(scope[hook.name]))
    return type("Specs", (), made)


def ours(program: Program, state: State, side: Side, freezer: Any = freeze) -> Registry | None:
    """Assembles the plugins as a run does; None where a run would refuse them."""
    specs = specs_of(
        program.hooks,
        lambda hook: hookspec(
            per="any",
            firstresult=hook.kind == "action",
            collection=hook.kind == "collection",
        ),
    )
    plugins = [Plugin("declares", "algorithm", SimpleNamespace(hookspecs=specs))]
    for idx, (role, impls) in enumerate(program.plugins):
        target = SimpleNamespace()
        for drawn in impls:
            hook = program.hooks[drawn.hook_idx]
            is_action = hook.kind == "action"
            acting = Acting(drawn, hook.kind, role, f"p{idx} {hook.name}", side)
            # One owner at most; a wrapper that may leave nothing says so.
            conditional = is_action and (drawn.wrapper or drawn.conditional or drawn.value is None)
            options = {drawn.phase: True} if drawn.phase else {}
            if is_action and not drawn.wrapper:  # an owner that names alone order is refused
                options = {"tryfirst" if conditional else "trylast": True}
            function = function_of(acting, hook)
            mark = hookimpl(wrapper=drawn.wrapper, conditional=conditional, **options)
            setattr(target, hook.name, mark(function))
        plugins.append(Plugin(f"p{idx}", role, target))
    registry = arrange(plugins)
    if registry.problems:
        assert all("plugins claim the action" in one.what for one in registry.problems)
        return None
    calls = {
        name: checked(hook, freezer(hook, tuple(registry.implementations[name]), state))
        for name, hook in registry.hooks.items()
        if hook.declared_by
    }
    side.call = lambda name, *args, **given: calls[name](state, *args, **given)
    return registry


def reference(program: Program, state: State, side: Side, registry: Registry) -> None:
    """Registers the same with pluggy: the last is called first."""
    manager = pluggy.PluginManager("reference")
    mark_spec = pluggy.HookspecMarker("reference")
    manager.add_hookspecs(
        specs_of(program.hooks, lambda hook: mark_spec(firstresult=hook.kind == "action"))
    )
    mark = pluggy.HookimplMarker("reference")
    for hook in program.hooks:
        found = list(registry.implementations[hook.name])
        if hook.kind == "action":
            plain = order_of_owners(one for one in found if not one.wrapper)
            found = [*(one for one in found if one.wrapper), *plain]
        for one in reversed(found):
            idx = int(one.plugin.name[1:])
            drawn = next(
                each
                for each in program.plugins[idx][1]
                if program.hooks[each.hook_idx].name == hook.name
            )
            role = one.plugin.role
            acting = Acting(drawn, hook.kind, role, f"p{idx} {hook.name}", side)
            function = mark(function_of(acting, hook), wrapper=drawn.wrapper)
            manager.register(
                SimpleNamespace(**{hook.name: function}), f"{one.plugin.name} {hook.name}"
            )
    kinds = {hook.name: hook.kind for hook in program.hooks}
    side.call = lambda name, **given: as_designed(
        kinds[name], name, getattr(manager.hook, name)(state=state, **given)
    )


def as_designed(kind: str, name: str, result: Any) -> Any:
    """Turns what pluggy returns into what the design makes of it, and of it alone."""
    if kind == "event":
        return None
    if kind == "question":
        return True in result
    if kind == "action" and result is None:
        raise PluginError(f"no plugin answered the action {name}")
    return result


def outcome_of(call: Callable[[], Any], side: Side) -> Any:
    try:
        return "returned", side.describe(call())
    except PluginError as error:
        return "refused", error.what
    except BaseException as error:
        return "raised", side.describe(error)


def compare(program: Program, new_state: Callable[[], State], freezer: Any = freeze) -> bool:
    """Asserts that both do the same; False where a run would refuse the program."""
    state = new_state()
    mine, theirs = Side(program.hooks), Side(program.hooks)
    registry = ours(program, state, mine, freezer)
    if registry is None:
        return False
    reference(program, state, theirs, registry)
    for hook_idx, num_positional, passes_all in program.calls:
        hook = program.hooks[hook_idx]
        names = ARGUMENTS[: hook.num_args] if passes_all else hook.required
        given = {name: name.upper() for name in names}
        args = [given[name] for name in names[:num_positional]]
        rest = {name: given[name] for name in names[num_positional:]}

        actual = outcome_of(lambda: mine.call(hook.name, *args, **rest), mine)
        expected = outcome_of(lambda: theirs.call(hook.name, **given), theirs)

        assert actual == expected
        assert mine.log == theirs.log
        assert state.enclosed is None  # no wrapper is under way any more
    return True


def settings_of(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=max_examples < 1000,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


@pytest.mark.parametrize(
    "max_examples", [150, pytest.param(2000, marks=pytest.mark.nightly)], ids=["few", "many"]
)
def test_hooks_of_plugins_equal_pluggys(new_state, max_examples):
    """Those who know pluggy know what `state.call` does."""
    num_compared = 0

    @settings_of(max_examples)
    @given(programs())
    def equal(program):
        nonlocal num_compared
        num_compared += compare(program, new_state)

    equal()

    assert num_compared > max_examples / 2


def without_wrappers(hook, found, state):
    return freeze(hook, [one for one in found if not one.wrapper], state)


def reversed_order(hook, found, state):
    return freeze(hook, found[::-1], state)


def first_results_alone(hook, found, state):
    plan = freeze(hook, found, state)
    return lambda *args: plan(*args)[:1] if hook.kind == "collection" else plan(*args)


def twice(hook, found, state):
    plan = freeze(hook, found, state)
    return lambda *args: (plan(*args), plan(*args))[1]


def with_falsy_results_left_out(hook, found, state):
    plan = freeze(hook, found, state)
    if hook.kind != "collection":
        return plan
    return lambda *args: [one for one in plan(*args) if one]


def without_defaults(hook, found, state):
    plan = freeze(hook, found, state)
    defaults = [f"{name}0" for name in ARGUMENTS]
    return lambda *args: plan(*("own" if one in defaults else one for one in args))


def swallowing(hook, found, state):
    plan = freeze(hook, found, state)

    def quiet(*args):
        try:
            return plan(*args)
        except ValueError:
            return None

    return quiet


@pytest.mark.sampled(3)
@pytest.mark.nightly
@pytest.mark.parametrize(
    "wrong",
    [
        without_wrappers,
        reversed_order,
        first_results_alone,
        twice,
        with_falsy_results_left_out,
        without_defaults,
        swallowing,
    ],
)
def test_the_comparison_finds_what_is_wrong(new_state, wrong):
    """A property that holds for everything says nothing."""

    @settings(settings_of(400), phases=[Phase.generate], report_multiple_bugs=False)
    @given(programs())
    def compare_with_wrong(program):
        compare(program, new_state, freezer=wrong)

    with pytest.raises(AssertionError):
        compare_with_wrong()
