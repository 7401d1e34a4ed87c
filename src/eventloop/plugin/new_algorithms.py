"""The line that is printed for a plugin that affects the training and is new to a project.

Plugins that affect the training are algorithms, and callbacks that can stop a run.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType, ModuleType

from eventloop.config.config_files import find_pyproject
from eventloop.files import disk
from eventloop.fixes import disable_in_file, in_command, shell, switch_off
from eventloop.naming import fold
from eventloop.plugin.records import Plugin

_FOLDER = ".eventloop"
_FILE = "algorithms.json"
# Plugins announced in this process already, by path of the record, which may not be writable.
_SAID: set[tuple[Path | None, str]] = set()


def affects_training(plugin: Plugin) -> bool:
    """Returns whether a run with this plugin can have another result than a run without it."""
    if plugin.role == "algorithm":
        return True
    return plugin.role == "callback" and can_stop_runs(plugin)


def can_stop_runs(plugin: Plugin) -> bool:
    """Returns whether a plugin can stop a run, from its attribute `stops_runs` or its code.

    A plugin without the attribute can stop a run if one of its methods calls `request_stop`, or if
    it implements `should_stop`. A `should_stop` that is annotated to return None doesn't count.
    """
    if plugin.facts.stops_runs is not None:
        return plugin.facts.stops_runs
    target = plugin.target
    owners = [target] if isinstance(target, ModuleType) else type(target).__mro__
    functions = [
        inspect.unwrap(value)
        for owner in owners
        for value in vars(owner).values()
        if inspect.isfunction(value)
    ]
    if any("request_stop" in _names_in(function.__code__) for function in functions):
        return True
    answer = getattr(target, "should_stop", None)
    if not callable(answer):
        return False
    return getattr(answer, "__annotations__", {}).get("return", "") not in (None, "None")


def _names_in(code: CodeType) -> Iterator[str]:
    """Yields the attributes and globals that a function uses, including its inner functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def first_runs(
    unasked: Iterable[Plugin], installed: Iterable[str], directory: Path | None
) -> list[str]:
    """Returns a line for each new plugin that affects the training, and records it as known.

    The record is in `.eventloop`, next to the nearest `pyproject.toml`. Without one, a command
    writes it into the directory; in Python nothing is written, and a line is shown once per
    process.

    Args:
        unasked: the active plugins that affect the training and weren't requested by name.
        installed: the names of all plugins; a removed plugin is new when it is installed again.
        directory: the directory that a command writes into; None in Python.
    """
    project = find_pyproject(directory or Path.cwd())
    folder = project[0].parent if project else directory
    path = folder and folder / _FOLDER / _FILE
    active = {fold(plugin.name): plugin for plugin in unasked}
    recorded_names = _known_to(path) if path else set()
    current_names = (recorded_names & set(map(fold, installed))) | active.keys()
    if path and current_names != recorded_names:
        with suppress(OSError):  # read-only: the next process says it again
            _remember(path, current_names)
    new_names = [
        name for name in sorted(active.keys() - recorded_names) if (path, name) not in _SAID
    ]
    _SAID.update((path, name) for name in new_names)
    return [_announcement(active[name]) for name in new_names]


def _known_to(path: Path) -> set[str]:
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
        return set(map(str, names))
    except (OSError, ValueError, TypeError):  # absent, or not what was written
        return set()


def _remember(path: Path, names: Iterable[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    if not (ignore := path.parent / ".gitignore").exists():
        ignore.write_text("*\n", encoding="ascii")
    disk.replace_file(path, f"{json.dumps(sorted(names))}\n".encode("ascii"))


def _announcement(plugin: Plugin) -> str:
    stop_note = "" if plugin.role == "algorithm" else ", can stop a run before its end"
    announcement = (
        f"new: {plugin.origin} is installed{stop_note}, and takes part here for the first time; "
    )
    disable_once = f"{switch_off(plugin.name)} leaves it out once, and " if in_command() else ""
    disable = shell("eventloop", "plugins", "disable", plugin.name)
    return f"{announcement}{disable_once}{disable} for good, with {disable_in_file(plugin.name)}"
