"""The order of a hook's implementations.

It depends only on which plugins are installed, never on how or when they were installed. The groups
are the task, algorithms, callbacks, callbacks that implement `log`, and the core. Within each
group, declared edges come first (the user's take precedence over a plugin's), then phase, then name.
A closing event runs its algorithms in the reverse order of its opening event. `close` reverses
roles and names, but not phases and edges.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eventloop.errors import PluginError
from eventloop.hook_markers import Edge, path_of
from eventloop.naming import fold
from eventloop.plugin.records import Plugin

if TYPE_CHECKING:
    from eventloop.clock import Time
    from eventloop.hook_markers import Hook


@dataclass(frozen=True)
class Implementation:
    """One plugin's implementation of one hook.

    Args:
        function: the function or bound method.
        argnames: the hook's arguments that the function takes, in the function's order.
        phase: 0 for tryfirst, 1, or 2 for trylast.
        wrapper: whether it wraps the plain implementations.
        conditional: whether it can pass an action on by returning None.
        before, after: names of plugins before or after which it runs.
        every: the interval; it runs only on the first call after each multiple. None for each call.
        rank_zero: whether it runs only on global rank 0.
        logs: whether its plugin implements `log` or `log_text`.
    """

    plugin: Plugin
    hook: Hook
    function: Callable[..., Any]
    argnames: tuple[str, ...]
    phase: int = 1
    wrapper: bool = False
    conditional: bool = False
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    every: Time | None = None
    rank_zero: bool = False
    logs: bool = False

    @property
    def origin(self) -> str:
        """The implementation as messages name it: plugin, distribution and hook."""
        return f"{self.plugin.origin}, {self.hook.name}"

    @property
    def where(self) -> str:
        """The file and line of the function, if known."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(self.function)

    def problem(self, message: str, fix: str) -> PluginError:
        """Returns a problem with it; see `Plugin.problem`."""
        return self.plugin.problem(message, fix, self.hook.name, at=self.where)


@dataclass(frozen=True)
class Ordered:
    """The implementations of a hook in order, with the reasons for the order.

    Args:
        edges: the effective edges, between plugins that implement the hook.
        reversed_from: the opening event whose order the algorithms reverse.
    """

    implementations: tuple[Implementation, ...]
    edges: tuple[Edge, ...] = ()
    reversed_from: str | None = None

    def __iter__(self) -> Iterator[Implementation]:
        return iter(self.implementations)

    def __len__(self) -> int:
        return len(self.implementations)

    def reason(self, first: Implementation, second: Implementation) -> str:
        """Returns why `first` runs before its neighbour `second`; "" if only the names decide."""
        if _tier(first) != _tier(second):
            return f"role: {_TIER_NAMES[_tier(first)]} before {_TIER_NAMES[_tier(second)]}"
        for edge in self.edges:
            if (edge.first, edge.then) == (_name(first), _name(second)):
                return f"edge: declared by {edge.declared_by}"
        if self.reversed_from is not None and _tier(first) == _ALGORITHM:
            return f"pair: the reverse of {self.reversed_from}"
        if _by_default([second, first])[0] is second:
            return "edge: through another plugin's"
        if first.phase != second.phase:
            return f"phase: {_PHASES[first.phase]} before {_PHASES[second.phase]}"
        return ""


def order(
    implementations: Iterable[Implementation],
    user_edges: Iterable[Edge] = (),
    opener: Iterable[Implementation] = (),
    opener_edges: Iterable[Edge] = (),
) -> Ordered:
    """Orders the implementations of a hook.

    Args:
        user_edges: the configuration's edges on this hook.
        opener: the implementations of the event that this one closes, if any.
        opener_edges: the configuration's edges on that event.

    Raises:
        PluginError: declared edges form a cycle or contradict the roles; the message names them.
    """
    impls = list(implementations)
    if len(impls) < 2:
        return Ordered(tuple(impls))
    impls = _by_default(impls)
    opener = [impl for impl in opener if _tier(impl) <= _ALGORITHM and not impl.wrapper]
    tiers: dict[int, list[Implementation]] = {}
    for impl in impls:
        tiers.setdefault(_tier(impl), []).append(impl)
    edges = _edges(impls, user_edges)
    _refuse_across_roles(edges, impls)
    ordered = [impl for tier in tiers.values() for impl in _sorted(tier, edges)]
    if opener:
        # Wrappers and callbacks of a closing event keep their usual order.
        closers = [impl for impl in ordered if _tier(impl) <= _ALGORITHM and not impl.wrapper]
        ids = set(map(id, closers))
        remaining = [impl for impl in ordered if id(impl) not in ids]
        edges_of_opener = _edges(opener, opener_edges)
        ordered = [*_reverse_of(opener, edges_of_opener, closers, edges), *remaining]
    names = {_name(impl) for impl in impls}
    effective_edges = tuple(edge for edge in edges if edge.first in names and edge.then in names)
    return Ordered(tuple(ordered), effective_edges, opener[0].hook.name if opener else None)


def order_of_owners(implementations: Iterable[Implementation]) -> tuple[Implementation, ...]:
    """Returns an action's ordered plain implementations in calling order: plugins, task, core."""
    return tuple(sorted(implementations, key=lambda impl: _LAYER[impl.plugin.role]))


def edges_that_cannot_hold(
    implementations: Iterable[Implementation],
    closers: Iterable[Implementation],
    active: Collection[str],
) -> Iterator[PluginError]:
    """Finds edges that plugins declare on a hook but that can't be satisfied.

    Edges to plugins that aren't active are allowed.

    Args:
        closers: implementations of the events that close this hook, and reverse its order.
        active: the folded names of all active plugins.
    """
    implementations = list(implementations)
    plain = {_name(impl) for impl in implementations if not impl.wrapper} | {
        _name(impl) for impl in closers
    }
    wrapping = {_name(impl) for impl in implementations if impl.wrapper}
    for impl in implementations:
        hook = impl.hook.name
        declared_edges = [("before", plugin_name) for plugin_name in impl.before] + [
            ("after", plugin_name) for plugin_name in impl.after
        ]
        for option, name in declared_edges:
            target = fold(name)
            reason = ""
            if target not in active or target == _name(impl):
                continue
            if target not in plain | wrapping:
                reason = f"{name} doesn't implement it"
                fix = "leave it out, or write it on a hook that both implement"
            elif impl.wrapper and option == "after" and target not in wrapping:
                reason = f"a wrapper encloses all plain implementations, including {name}'s"
                fix = "leave it out; the second half of a wrapper runs after what it encloses"
            elif not impl.wrapper and option == "before" and target not in plain:
                reason = f"{name} wraps it, and a wrapper encloses all plain implementations"
                fix = "leave it out, or make this a wrapper"
            if reason:
                yield impl.problem(f"{option}={name!r} can't hold on {hook}: {reason}", fix)


_TASK, _ALGORITHM, _CALLBACK, _LOGGER, _CORE = range(5)
_TIER_NAMES = ("task", "algorithm", "callback", "callback that implements log", "core")
_TIER = {"task": _TASK, "algorithm": _ALGORITHM, "callback": _CALLBACK, "core": _CORE}
_LAYER = {"algorithm": 0, "callback": 0, "task": 1, "core": 2}
_PHASES = ("tryfirst", "normal", "trylast")


def _tier(impl: Implementation) -> int:
    is_logger = impl.plugin.role == "callback" and impl.logs
    return _LOGGER if is_logger else _TIER[impl.plugin.role]


def _name(impl: Implementation) -> str:
    return fold(impl.plugin.name)


def _key(impl: Implementation) -> tuple[int, int, str, str]:
    return _tier(impl), impl.phase, _name(impl), getattr(impl.function, "__name__", "")


def _by_default(implementations: Iterable[Implementation]) -> list[Implementation]:
    """Orders implementations of a hook by role, phase and name, ignoring edges."""
    impls = sorted(implementations, key=_key)
    if impls[0].hook.name == "close":
        impls.reverse()
        impls.sort(key=lambda impl: (-_tier(impl), impl.phase))
    return impls


def _edges(impls: Sequence[Implementation], user_edges: Iterable[Edge]) -> list[Edge]:
    """Returns the user's edges, and the plugins' edges that don't contradict them.

    An edge of a plugin is dropped if the user's edges lead the other way: the user can overrule it.
    """
    edges = list(user_edges)
    declared_edges = {
        Edge(fold(earlier), fold(later), impl.origin)
        for impl in impls
        for earlier, later in [
            *((impl.plugin.name, target) for target in impl.before),
            *((target, impl.plugin.name) for target in impl.after),
        ]
    }
    for edge in sorted(declared_edges, key=lambda edge: (edge.first, edge.then, edge.declared_by)):
        if path_of(edge.then, edge.first, [impl for impl in edges if impl.by_user]) is None:
            edges.append(edge)
    names = {_name(impl): impl.plugin.name for impl in impls}
    return [edge.named(names) for edge in edges]


def _refuse_across_roles(edges: Iterable[Edge], impls: Sequence[Implementation]) -> None:
    """Raises PluginError if an edge contradicts the order of the roles."""
    tiers = {_name(impl): _tier(impl) for impl in impls}
    tier_order = list(dict.fromkeys(tiers.values()))
    for edge in edges:
        tier_of_first = tiers.get(edge.first)
        tier_of_second = tiers.get(edge.then)
        if tier_of_first is None or tier_of_second is None:
            continue
        if tier_order.index(tier_of_first) > tier_order.index(tier_of_second):
            raise PluginError(
                f"{edge.typed[0]} can't run before {edge.typed[1]}: {_TIER_NAMES[tier_of_second]}s run "
                f"before {_TIER_NAMES[tier_of_first]}s",
                subjects=_declaring([edge], impls),
                edge=str(edge),
                hook=impls[0].hook.name,
                fix="leave the edge out",
            )


def _declaring(edges: Iterable[Edge], impls: Iterable[Implementation]) -> list[Plugin]:
    """Returns the plugins that declare these edges; the configuration's edges have no plugin."""
    declared_by = {edge.declared_by for edge in edges}
    return [impl.plugin for impl in impls if impl.origin in declared_by]


def _sorted(members: Sequence[Implementation], edges: Sequence[Edge]) -> list[Implementation]:
    """Sorts topologically; the first member that no edge blocks comes next.

    Args:
        members: in default order.
    """
    waiting = list(members)
    if not edges:
        return waiting
    result = []
    while waiting:
        names = {_name(impl) for impl in waiting}
        blocked = {edge.then for edge in edges if edge.first in names and edge.first != edge.then}
        ready = next((impl for impl in waiting if _name(impl) not in blocked), None)
        if ready is None:
            raise _cycle(waiting, edges)
        waiting.remove(ready)
        result.append(ready)
    return result


def _reverse_of(
    opener: Sequence[Implementation],
    opener_edges: Sequence[Edge],
    closers: Sequence[Implementation],
    edges: Sequence[Edge],
) -> list[Implementation]:
    """Orders a closing event's plain algorithms: first in, last out.

    The algorithms of both events are ordered by the opener's phases and edges. An algorithm that
    implements only the closer is placed so that its phase holds after the reversal. Edges on the
    closer aren't reversed, and take precedence.
    """
    in_both = {_name(impl) for impl in opener}
    only_closers = [impl for impl in closers if _name(impl) not in in_both]
    keys = {id(impl): _key(impl) for impl in opener}
    keys |= {id(impl): (_tier(impl), 2 - impl.phase, _name(impl), "") for impl in only_closers}
    all_algorithms = sorted([*opener, *only_closers], key=lambda impl: keys[id(impl)])
    names = [_name(impl) for impl in _sorted(all_algorithms, opener_edges)]
    position = {name: idx for idx, name in enumerate(names)}
    return _sorted(sorted(closers, key=lambda impl: -position[_name(impl)]), edges)


def _cycle(waiting: Sequence[Implementation], edges: Sequence[Edge]) -> PluginError:
    names = sorted({_name(impl) for impl in waiting})
    edges_in_cycle = [edge for edge in edges if edge.first in names and edge.then in names]
    cycle = next(
        path for name in names if (path := path_of(name, name, edges_in_cycle)) is not None
    )
    around = " → ".join([cycle[0].typed[0], *(edge.typed[1] for edge in cycle)])
    return PluginError(
        f"the order of {waiting[0].hook.name} has a cycle: {around}",
        subjects=_declaring(cycle, waiting),
        **{f"edge {idx}": str(edge) for idx, edge in enumerate(cycle, 1)},
        fix="take one edge out, or overrule it in [tool.eventloop.order]",
    )
