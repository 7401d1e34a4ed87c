"""Fixes in messages, in the form the user needs: flags and commands, or arguments in Python."""

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
    """Returns a command between backticks, which is safe to paste even with untrusted words.

    Control characters are escaped as in Python, so that the command stays on a line. The caller must
    not pass an untrusted word that begins with a dash, which would be read as an option.
    """
    return f"`{' '.join(shlex.quote(one_line(word)) for word in words)}`"


# Global to the process rather than a context variable: threads that save or watch write messages, too.
_in_command = False


def in_command() -> bool:
    """Returns whether messages are for the user of a command, rather than for Python code."""
    return _in_command


@contextmanager
def for_command() -> Iterator[None]:
    """Makes all fixes in messages use flags and commands, inside a `with` block."""
    global _in_command
    was_in_command = _in_command
    _in_command = True
    try:
        yield
    finally:
        _in_command = was_in_command


def as_set(**settings: object) -> str:
    """Returns settings with values in the form the user writes them, between backticks.

    `--run-dir FOLDER` on the command line, `run_dir="FOLDER"` in Python.
    """
    if _in_command:
        return _flags(settings)
    return f"`{_assignments(settings)}`"


def as_option(plugin: str, **options: object) -> str:
    """Returns a plugin's options with values in the form the user writes them, between backticks.

    `--ema.half-life 100ba` on the command line, `Ema(half_life="100ba")` in Python.

    Args:
        plugin: the plugin's name, which must be its class's name in kebab-case.
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
    """Returns how the user allows a difference from the resumed run, between backticks.

    Args:
        change: an argument of `Allowed`.
        name: the plugin, if the difference concerns a plugin.
    """
    if _in_command:
        return shell(f"--allow-{change.replace('_', '-')}", *filter(None, [name]))
    value = f"({json.dumps(name)},)" if name else "True"
    return f"`TrainerBuilder(allowed=Allowed({change}={value})).build(task, ...)`"


def switch_off(name: str) -> str:
    """Returns how the user switches an installed plugin off: for this run, or in a file."""
    return shell("-p", f"no:{name}") if _in_command else disable_in_file(name)


def disable_in_file(name: str) -> str:
    """Returns the line that permanently disables an installed plugin."""
    return f"`disable = [{json.dumps(one_line(name))}]` in [tool.eventloop] of pyproject.toml"


@functools.cache
def published() -> dict[str, str]:
    """Returns the distributions in the core's repository, by plugin, command or package name."""
    text = resources.files("eventloop").joinpath("published.txt").read_text("utf-8")
    return dict(line.split() for line in text.splitlines())


def distribution_of(name: str) -> str:
    """Returns the distribution of a plugin; for an unknown plugin, `eventloop-NAME`."""
    name = fold(name).replace("_", "-")
    return published().get(name, f"eventloop-{name}")


def install(name: str, versions: str = "") -> str:
    """Returns how to install a missing plugin; if its distribution isn't known, how to list plugins.

    Args:
        name: the plugin, command or option. If its distribution is installed but has no such plugin,
            the text says what the distribution is for.
        versions: the required version range, in pip's syntax.
    """
    if use := use_without_plugin(name):
        return f"leave it out; {use}"
    distribution = distribution_of(name)
    if distribution in published().values():
        clone = pip("install", f"./plugins/{distribution}")
        return f"install it, {pip('install', f'{distribution}{versions}')}, or from a clone {clone}"
    return "list what is installed with `eventloop plugins`"


def use_without_plugin(name: str) -> str:
    """Returns the use of an installed package that has no plugin of its name.

    Returns "" if the package isn't installed, or has such a plugin.
    """
    import importlib_metadata  # imported only for such a message

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
    """Returns a pip command between backticks; a requirement can't be read as an option."""
    guard = ("--",) if any(requirement.startswith("-") for requirement in requirements) else ()
    return shell("pip", *action.split(), *guard, *requirements)
