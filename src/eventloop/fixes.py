"""Advice in messages, as the caller would write it: flags and commands, or arguments in Python."""

from __future__ import annotations

import functools
import itertools
import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import resources

from eventloop.naming import camel, fold
from eventloop.safe_text import one_line


def shell(*words: str) -> str:
    """Returns a command between backticks, safe to paste whatever its words hold.

    What isn't printed is written as in Python, so that one line stays one. A word that isn't the
    first but begins as an option does, without being one of ours, is for the caller to keep out.
    """
    return f"`{' '.join(shlex.quote(one_line(word)) for word in words)}`"


_in_command = False  # of the process, not of a thread: savers and watchdogs write messages, too


def in_command() -> bool:
    """Returns whether messages are for the user of the command, not for a caller in Python."""
    return _in_command


@contextmanager
def for_command() -> Iterator[None]:
    """Writes the fixes of all messages as flags and commands while the command runs."""
    global _in_command
    was_in_command = _in_command
    _in_command = True
    try:
        yield
    finally:
        _in_command = was_in_command


def as_set(**settings: object) -> str:
    """Returns settings with values as the caller writes them, between backticks.

    `--run-dir FOLDER` on the command line, `run_dir="FOLDER"` in Python.
    """
    if _in_command:
        return _flags(settings)
    return f"`{_assignments(settings)}`"


def as_option(plugin: str, **options: object) -> str:
    """Returns options of a plugin with values as the caller writes them, between backticks.

    `--ema.half-life 100ba` on the command line, `Ema(half_life="100ba")` in Python.

    Args:
        plugin: its name, which is its class's in kebab-case.
    """
    if _in_command:
        return _flags({f"{plugin}.{name}": value for name, value in options.items()})
    return f"`{camel(plugin)}({_assignments(options)})`"


def _flags(options: Mapping[str, object]) -> str:
    flags = ((f"--{name.replace('_', '-')}", str(value)) for name, value in options.items())
    return shell(*itertools.chain(*flags))


def _assignments(options: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in options.items())


def allowing(change: str, name: str = "") -> str:
    """Returns how the caller allows what differs from a run that is resumed, between backticks.

    Args:
        change: an argument of `Allowed`.
        name: of the plugin, where it is about one.
    """
    if _in_command:
        return shell(f"--allow-{change.replace('_', '-')}", *filter(None, [name]))
    value = f"({json.dumps(name)},)" if name else "True"
    return f"`TrainerBuilder(allowed=Allowed({change}={value})).build(task, ...)`"


def switch_off(name: str) -> str:
    """Returns how the caller switches an installed plugin off: for this run, or in a file."""
    return shell("-p", f"no:{name}") if _in_command else disable_in_file(name)


def disable_in_file(name: str) -> str:
    """Returns the line that switches an installed plugin off for good."""
    return f"`disable = [{json.dumps(one_line(name))}]` in [tool.eventloop] of pyproject.toml"


@functools.cache
def published() -> dict[str, str]:
    """Returns the distribution of each plugin, command and package of the core's own repository."""
    text = resources.files("eventloop").joinpath("published.txt").read_text("utf-8")
    return dict(line.split() for line in text.splitlines())


def distribution_of(name: str) -> str:
    """Returns the distribution that has a plugin, or would have by its name."""
    name = fold(name).replace("_", "-")
    return published().get(name, f"eventloop-{name}")


def install(name: str, versions: str = "") -> str:
    """Returns how a missing plugin is installed, or else how the installed ones are listed.

    Args:
        name: of the plugin, command or option; a distribution that has it and is installed has no
            plugin.
        versions: the range that is needed, in pip's syntax.
    """
    if use := use_without_plugin(name):
        return f"leave it out; {use}"
    distribution = distribution_of(name)
    if distribution in published().values():
        clone = pip("install", f"./plugins/{distribution}")
        return f"install it, {pip('install', f'{distribution}{versions}')}, or from a clone {clone}"
    return "list what is installed with `eventloop plugins`"


def use_without_plugin(name: str) -> str:
    """Returns what an installed package without a plugin of its name is for; "" if there is no such package."""
    import importlib_metadata  # not for every message

    package = distribution_of(name)
    distribution = next(iter(importlib_metadata.distributions(name=package)), None)
    if distribution is None:
        return ""
    points = distribution.entry_points
    names: dict[str, list[str]] = {}
    for point in points:
        names.setdefault(point.group, []).append(point.name)
    plugins = sorted(names.get("eventloop.algorithms", []) + names.get("eventloop.callbacks", []))
    if fold(name) in map(fold, plugins):
        return ""
    if plugins:
        return (
            f"{package} is installed, but has no plugin of this name: it adds {', '.join(plugins)}"
        )
    commands = names.get("eventloop.commands", ())
    uses = [f"the command {shell('eventloop', command)}" for command in commands]
    uses += [f"the option `--{option}`" for option in names.get("eventloop.options", ())]
    if "eventloop.storage" in names:
        uses.append("checkpoints at URLs")
    if not uses:
        return f"{package} is installed, but is a library to import and has no plugin"
    return f"{package} is installed, but has no plugin: it adds {', '.join(uses)}"


def pip(action: str, *requirements: str) -> str:
    """Returns a command of pip's between backticks; no requirement is taken for an option."""
    guard = ("--",) if any(one.startswith("-") for one in requirements) else ()
    return shell("pip", *action.split(), *guard, *requirements)
