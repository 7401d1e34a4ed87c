"""The plugins that a run names: objects, or the names of installed ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from eventloop import PluginError
from eventloop.toolbox import closest

ALGORITHMS = "eventloop.algorithms"
CALLBACKS = "eventloop.callbacks"


def plugins_of(named: Iterable[object]) -> tuple[list[object], list[object]]:
    """Returns the algorithms and the callbacks among what was named.

    Raises:
        PluginError: no plugin has a name.
    """
    installed = {one.name: one for group in (ALGORITHMS, CALLBACKS) for one in _points(group)}
    made: dict[str, list[object]] = {ALGORITHMS: [], CALLBACKS: []}
    for one in named:
        point = installed.get(one) if isinstance(one, str) else _of_class(one, installed.values())
        if isinstance(one, str):
            if point is None:
                raise PluginError(
                    f"plugins=[{one!r}]: no plugin is named {one!r}{closest(one, installed)}",
                    fix=f"install it, `python -m pip install eventloop-{one}`, or leave it out",
                )
            one = point.load()()
        made[CALLBACKS if point is not None and point.group == CALLBACKS else ALGORITHMS].append(
            one
        )
    return made[ALGORITHMS], made[CALLBACKS]


def unnamed(plugins: Sequence[Any]) -> list[str]:
    """Returns the names of the installed algorithms that don't take part."""
    return sorted({one.name for one in _points(ALGORITHMS)} - {one.name for one in plugins})


def _points(group: str) -> Sequence[EntryPoint]:
    return tuple(entry_points(group=group))


def _of_class(one: object, points: Iterable[EntryPoint]) -> EntryPoint | None:
    """Returns the entry point of an object's package, whose role it has."""
    package = type(one).__module__.partition(".")[0]
    return next((point for point in points if point.module.partition(".")[0] == package), None)
