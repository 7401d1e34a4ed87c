"""Order: depends only on what is installed, never on how or when it was installed.

Within a hook: the task, algorithms, callbacks, callbacks that implement `log`, the core. Within
each group: declared edges, the user's before a plugin's; then phase; then name. A closing event
runs its algorithms in reverse order of its opening event. `close` reverses roles and names, but
not its phases and edges.
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
        argnames: the hook's arguments that it takes, in its order.
        phase: 0 for tryfirst, 1, or 2 for trylast.
        wrapper: whether it wraps the plain implementations.
        conditional: whether it can pass an action on by returning None.
        before, after: names of plugins that it runs before or after.
        every: runs only on the first call after each multiple of it.
        rank_zero: runs only on global rank 0.
        logs: whether its plugin implements `log`.
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

    def problem(self, what: str, fix: str) -> PluginError:
        """Returns a problem with it; see `Plugin.problem`."""
        return self.plugin.problem(what, fix, self.hook.name, at=self.where)


@dataclass(frozen=True)
class Ordered:
    """The implementations of a hook in order, with the reasons.

    Args:
        edges: the effective ones: within one role, of plugins that implement the hook.
        reversed_from: the opening event whose order the algorithms reverse.
    """

    implementations: tuple[Implementation, ...]
    edges: tuple[Edge, ...] = ()
    reversed_from: str | None = None

    def __iter__(self) -> Iterator[Implementation]:
        return iter(self.implementations)

    def __len__(self) -> int:
        return len(self.implementations)

    def reason(self, first: Implementation, then: Implementation) -> str:
        """Returns why the first of two neighbours runs before the second; "" if only for its name."""
        if _tier(first) != _tier(then):
            return f"role: {_TIER_NAMES[_tier(first)]} before {_TIER_NAMES[_tier(then)]}"
        for edge in self.edges:
            if (edge.first, edge.then) == (_name(first), _name(then)):
                return f"edge: declared by {edge.declared_by}"
        if self.reversed_from is not None and _tier(first) == _ALGORITHM:
            return f"pair: the reverse of {self.reversed_from}"
        if _by_default([then, first])[0] is then:
            return "edge: through another plugin's"
        if first.phase != then.phase:
            return f"phase: {_PHASES[first.phase]} before {_PHASES[then.phase]}"
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
        PluginError: declared edges contradict each other or the roles; the message says where.
    """
    impls = list(implementations)
    if len(impls) < 2:
        return Ordered(tuple(impls))
    impls = _by_default(impls)
    opener = [one for one in opener if _tier(one) <= _ALGORITHM and not one.wrapper]
    tiers: dict[int, list[Implementation]] = {}
    for one in impls:
        tiers.setdefault(_tier(one), []).append(one)
    edges = _edges(impls, user_edges)
    _refuse_across_roles(edges, impls)
    ordered = [one for tier in tiers.values() for one in _sorted(tier, edges)]
    if opener:
        closers = [one for one in ordered if _tier(one) <= _ALGORITHM and not one.wrapper]
        ids = set(map(id, closers))
        others = [one for one in ordered if id(one) not in ids]
        entered = _edges(opener, opener_edges)
        ordered = [*_reverse_of(opener, entered, closers, edges), *others]
    names = {_name(one) for one in impls}
    counted = tuple(edge for edge in edges if edge.first in names and edge.then in names)
    return Ordered(tuple(ordered), counted, opener[0].hook.name if opener else None)


def order_of_owners(implementations: Iterable[Implementation]) -> tuple[Implementation, ...]:
    """Returns an action's ordered plain implementations in calling order: plugins, task, core."""
    return tuple(sorted(implementations, key=lambda one: _LAYER[one.plugin.role]))


def edges_that_cannot_hold(
    found: Iterable[Implementation], closers: Iterable[Implementation], active: Collection[str]
) -> Iterator[PluginError]:
    """Finds plugins' edges on a hook to active plugins that can't be satisfied.

    Args:
        closers: implementations of the events that close this one, and reverse its order.
        active: the folded names of all active plugins.
    """
    found = list(found)
    plain = {_name(one) for one in found if not one.wrapper} | {_name(one) for one in closers}
    wrapping = {_name(one) for one in found if one.wrapper}
    for one in found:
        hook = one.hook.name
        wishes = [("before", n) for n in one.before] + [("after", n) for n in one.after]
        for option, name in wishes:
            other = fold(name)
            what = ""
            if other not in active or other == _name(one):
                continue
            if other not in plain | wrapping:
                what = f"{name} doesn't implement it"
                fix = "leave it out, or write it on a hook that both implement"
            elif one.wrapper and option == "after" and other not in wrapping:
                what = f"a wrapper encloses all plain implementations, that of {name}, too"
                fix = "leave it out; the second half of a wrapper runs after what it encloses"
            elif not one.wrapper and option == "before" and other not in plain:
                what = f"{name} wraps it, and a wrapper encloses all plain implementations"
                fix = "leave it out, or make this a wrapper"
            if what:
                yield one.problem(f"{option}={name!r} can't hold on {hook}: {what}", fix)


_TASK, _ALGORITHM, _CALLBACK, _LOGGER, _CORE = range(5)
_TIER_NAMES = ("task", "algorithm", "callback", "callback that implements log", "core")
_TIER = {"task": _TASK, "algorithm": _ALGORITHM, "callback": _CALLBACK, "core": _CORE}
_LAYER = {"algorithm": 0, "callback": 0, "task": 1, "core": 2}
_PHASES = ("tryfirst", "normal", "trylast")


def _tier(one: Implementation) -> int:
    is_logger = one.plugin.role == "callback" and one.logs
    return _LOGGER if is_logger else _TIER[one.plugin.role]


def _name(one: Implementation) -> str:
    return fold(one.plugin.name)


def _key(one: Implementation) -> tuple[int, int, str, str]:
    return _tier(one), one.phase, _name(one), getattr(one.function, "__name__", "")


def _by_default(implementations: Iterable[Implementation]) -> list[Implementation]:
    """Orders implementations of a hook by default, ignoring edges."""
    impls = sorted(implementations, key=_key)
    if impls[0].hook.name == "close":
        impls.reverse()
        impls.sort(key=lambda one: (-_tier(one), one.phase))
    return impls


def _edges(impls: Sequence[Implementation], user_edges: Iterable[Edge]) -> list[Edge]:
    """Returns the user's edges, and the plugins' edges that don't contradict them."""
    edges = list(user_edges)
    wishes = {
        Edge(fold(first), fold(then), one.origin)
        for one in impls
        for first, then in [
            *((one.plugin.name, other) for other in one.before),
            *((other, one.plugin.name) for other in one.after),
        ]
    }
    for edge in sorted(wishes, key=lambda edge: (edge.first, edge.then, edge.declared_by)):
        if path_of(edge.then, edge.first, [one for one in edges if one.by_user]) is None:
            edges.append(edge)
    names = {_name(one): one.plugin.name for one in impls}
    return [edge.named(names) for edge in edges]


def _refuse_across_roles(edges: Iterable[Edge], impls: Sequence[Implementation]) -> None:
    tiers = {_name(one): _tier(one) for one in impls}
    tier_order = list(dict.fromkeys(tiers.values()))
    for edge in edges:
        first = tiers.get(edge.first)
        then = tiers.get(edge.then)
        if first is None or then is None:
            continue
        if tier_order.index(first) > tier_order.index(then):
            raise PluginError(
                f"{edge.typed[0]} can't run before {edge.typed[1]}: {_TIER_NAMES[then]}s run "
                f"before {_TIER_NAMES[first]}s",
                subjects=_declaring([edge], impls),
                edge=str(edge),
                hook=impls[0].hook.name,
                fix="leave the edge out",
            )


def _declaring(edges: Iterable[Edge], impls: Iterable[Implementation]) -> list[Plugin]:
    """Returns the plugins that declare edges; edges of the configuration have none."""
    declared_by = {edge.declared_by for edge in edges}
    return [one.plugin for one in impls if one.origin in declared_by]


def _sorted(members: Sequence[Implementation], edges: Sequence[Edge]) -> list[Implementation]:
    """Sorts topologically, always taking the first member whose edges allow it.

    Args:
        members: in default order.
    """
    waiting = list(members)
    if not edges:
        return waiting
    result = []
    while waiting:
        names = {_name(one) for one in waiting}
        blocked = {edge.then for edge in edges if edge.first in names and edge.first != edge.then}
        ready = next((one for one in waiting if _name(one) not in blocked), None)
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

    The algorithms of both events are ordered by the opener's phases and edges; one that implements
    only the closer is placed so that its phase holds after the reversal. Edges on the closer
    aren't reversed, and take precedence.
    """
    in_both = {_name(one) for one in opener}
    alone = [one for one in closers if _name(one) not in in_both]
    keys = {id(one): _key(one) for one in opener}
    keys |= {id(one): (_tier(one), 2 - one.phase, _name(one), "") for one in alone}
    together = sorted([*opener, *alone], key=lambda one: keys[id(one)])
    names = [_name(one) for one in _sorted(together, opener_edges)]
    position = {name: idx for idx, name in enumerate(names)}
    return _sorted(sorted(closers, key=lambda one: -position[_name(one)]), edges)


def _cycle(waiting: Sequence[Implementation], edges: Sequence[Edge]) -> PluginError:
    names = sorted({_name(one) for one in waiting})
    inside = [edge for edge in edges if edge.first in names and edge.then in names]
    cycle = next(path for name in names if (path := path_of(name, name, inside)) is not None)
    around = " → ".join([cycle[0].typed[0], *(edge.typed[1] for edge in cycle)])
    return PluginError(
        f"the order of {waiting[0].hook.name} goes round in a circle: {around}",
        subjects=_declaring(cycle, waiting),
        **{f"edge {idx}": str(edge) for idx, edge in enumerate(cycle, 1)},
        fix="take one edge out, or overrule it in [tool.eventloop.order]",
    )
