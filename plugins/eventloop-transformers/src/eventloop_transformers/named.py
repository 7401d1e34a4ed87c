"""The plugins of a run: objects, or names of installed plugins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from eventloop import PluginError
from eventloop.toolbox import closest

ALGORITHMS = "eventloop.algorithms"
CALLBACKS = "eventloop.callbacks"


def plugins_of(named: Iterable[object]) -> tuple[list[object], list[object]]:
    """Returns the algorithms and the callbacks among the given plugins.

    Raises:
        PluginError: no installed plugin has a given name.
    """
    installed = {
        entry_point.name: entry_point
        for group in (ALGORITHMS, CALLBACKS)
        for entry_point in _points(group)
    }
    plugins: dict[str, list[object]] = {ALGORITHMS: [], CALLBACKS: []}
    for plugin in named:
        if isinstance(plugin, str):
            point = installed.get(plugin)
            if point is None:
                raise PluginError(
                    f"plugins=[{plugin!r}]: no plugin is named {plugin!r}{closest(plugin, installed)}",
                    fix=f"install it, `python -m pip install eventloop-{plugin}`, or leave it out",
                )
            instance = point.load()()
        else:
            point = _of_class(plugin, installed.values())
            instance = plugin
        is_callback = point is not None and point.group == CALLBACKS
        plugins[CALLBACKS if is_callback else ALGORITHMS].append(instance)
    return plugins[ALGORITHMS], plugins[CALLBACKS]


def unnamed(plugins: Sequence[Any]) -> list[str]:
    """Returns the names of the installed algorithms that aren't used."""
    used_names = {plugin.name for plugin in plugins}
    return sorted({entry_point.name for entry_point in _points(ALGORITHMS)} - used_names)


def _points(group: str) -> Sequence[EntryPoint]:
    return tuple(entry_points(group=group))


def _of_class(plugin: object, points: Iterable[EntryPoint]) -> EntryPoint | None:
    """Returns the entry point of an object's package, which defines its role."""
    package = type(plugin).__module__.partition(".")[0]
    return next((point for point in points if point.module.partition(".")[0] == package), None)
