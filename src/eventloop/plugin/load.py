"""Step 3, load: import what takes part, one by one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from eventloop.errors import PluginError
from eventloop.failing.signals import Interrupted, told_from_a_key
from eventloop.plugin.from_file import import_from_file
from eventloop.plugin.records import Found, Selected


@dataclass(frozen=True)
class Loaded:
    """A plugin and the object that its entry point names: a class, an instance or a module."""

    found: Found
    target: object


def load(
    selected: Iterable[Selected],
) -> tuple[tuple[Loaded, ...], tuple[PluginError, ...]]:
    """Imports the active plugins.

    Returns:
        Those that could be imported, and a problem for each of the others.
    """
    loaded = []
    problems = []
    for one in selected:
        if one.status == "active":
            try:
                with told_from_a_key():
                    loaded.append(Loaded(one.found, _target(one.found)))
            except Interrupted:
                raise
            # Whatever its code does when imported, SystemExit too, is that plugin's problem.
            except BaseException as error:  # noqa: BLE001
                problems.append(_problem(one.found, error))
    return tuple(loaded), tuple(problems)


def _target(found: Found) -> object:
    return found.entry_point.load() if found.path is None else import_from_file(found)


def _problem(found: Found, error: BaseException) -> PluginError:
    way_out = f"leave `-p {found.entry_point.value}` out"
    if found.path is None:
        way_out = (
            f"switch the plugin off with `-p no:{found.name}`, or remove it with "
            f"`pip uninstall {found.distribution}`"
        )
    problem = PluginError(
        f"plugin {found.name!r} can't be imported: {type(error).__name__}: {error}",
        plugin=found.origin,
        entry_point=f"{found.entry_point.group}: {found.entry_point.value}",
        fix=way_out,
    )
    problem.__cause__ = error
    return problem
