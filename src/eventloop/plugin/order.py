"""Order: a function of what is installed, never of how or when it was installed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from eventloop.hooks import Hook
from eventloop.plugin.records import Plugin, fold


@dataclass(frozen=True)
class Implementation:
    """One plugin's implementation of one hook.

    Args:
        function: the function or bound method.
        argnames: those of the hook's arguments that it takes, in its own order.
        phase: 0 for tryfirst, 1, or 2 for trylast.
        wrapper: whether it encloses the plain implementations.
        conditional: whether it may pass an action on by returning None.
        logs: whether its plugin implements `log`.
    """

    plugin: Plugin
    hook: Hook
    function: Callable[..., Any]
    argnames: tuple[str, ...]
    phase: int = 1
    wrapper: bool = False
    conditional: bool = False
    logs: bool = False

    @property
    def origin(self) -> str:
        """The implementation as messages name it: plugin, distribution and hook."""
        return f"{self.plugin.origin}, {self.hook.name}"

    @property
    def where(self) -> str:
        """File and line of the function, as far as Python knows them."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(self.function)


def order(implementations: Iterable[Implementation]) -> tuple[Implementation, ...]:
    """Puts the implementations of one hook into the order in which they are called.

    The task, algorithms, callbacks, those callbacks that implement `log`, the core; within each
    by phase, then by name.
    """
    return tuple(sorted(implementations, key=_place))


def order_of_owners(implementations: Iterable[Implementation]) -> tuple[Implementation, ...]:
    """Puts the plain implementations of one action into the order in which they are asked.

    Plugins, then the task, then the core; within the plugins as in `order`.
    """
    return tuple(sorted(implementations, key=lambda one: (_LAYER[one.plugin.role], _place(one))))


_TIER = {"task": 0, "algorithm": 1, "callback": 2, "core": 4}
_LAYER = {"algorithm": 0, "callback": 0, "task": 1, "core": 2}


def _place(one: Implementation) -> tuple[int, int, str]:
    tier = _TIER[one.plugin.role]
    if one.plugin.role == "callback" and one.logs:
        tier = 3
    return tier, one.phase, fold(one.plugin.name)
