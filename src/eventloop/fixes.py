"""What to do, in messages, as the caller would write it: flags and commands, or Python's arguments."""

from __future__ import annotations

import functools
import itertools
import json
import shlex
from importlib import resources

from eventloop.errors import Wording
from eventloop.naming import camel, fold
from eventloop.safe_text import one_line


def shell(*words: str) -> str:
    """Returns a command between backticks, safe to paste whatever its words hold.

    What isn't printed is written as in Python, so that one line stays one. A word that isn't the
    first but begins as an option does, without being one of ours, is for the caller to keep out.
    """
    return f"`{' '.join(shlex.quote(one_line(word)) for word in words)}`"


def as_set(**settings: object) -> Wording:
    """Returns settings with values as the caller writes them, between backticks.

    `--run-dir FOLDER` on the command line, `run_dir="FOLDER"` in Python.
    """
    flags = ((f"--{name.replace('_', '-')}", str(value)) for name, value in settings.items())
    assignments = ", ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
    return Wording(f"`{assignments}`", shell(*itertools.chain(*flags)))


def as_option(plugin: str, **options: object) -> Wording:
    """Returns options of a plugin with values as the caller writes them, between backticks.

    `--ema.half-life 100ba` on the command line, `Ema(half_life="100ba")` in Python.

    Args:
        plugin: its name, which is its class's in kebab-case.
    """
    flags = as_set(**{f"{plugin}.{name}": value for name, value in options.items()})
    return Wording(f"`{camel(plugin)}({as_set(**options)[1:-1]})`", flags.shell)


def allowing(change: str, name: str = "") -> Wording:
    """Returns how the caller allows what differs from a run that is resumed, between backticks.

    Args:
        change: an argument of `Allowed`.
        name: of the plugin, where it is about one.
    """
    value = f"({json.dumps(name)},)" if name else "True"
    return Wording(
        f"`TrainerBuilder(allowed=Allowed({change}={value})).build(task, ...)`",
        shell(f"--allow-{change.replace('_', '-')}", *filter(None, [name])),
    )


def switch_off(name: str) -> Wording:
    """Returns how the caller switches an installed plugin off."""
    line = f"`disable = [{json.dumps(one_line(name))}]` in [tool.eventloop] of pyproject.toml"
    return Wording(line, shell("-p", f"no:{name}"))


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
    uses = [f"the command {_command(command)}" for command in names.get("eventloop.commands", ())]
    uses += [f"the option `--{option}`" for option in names.get("eventloop.options", ())]
    if "eventloop.storage" in names:
        uses.append("checkpoints at URLs")
    if not uses:
        return f"{package} is installed, but is a library to import and has no plugin"
    return f"{package} is installed, but has no plugin: it adds {', '.join(uses)}"


def _command(name: str) -> str:
    """Returns a command that a package adds; that of `plugins-show` is `eventloop plugins show`."""
    subcommand = name.removeprefix("plugins-")
    return (
        shell("eventloop", name)
        if subcommand == name
        else shell("eventloop", "plugins", subcommand)
    )


def pip(action: str, *requirements: str) -> str:
    """Returns a command of pip's between backticks; no requirement is taken for an option."""
    guard = ("--",) if any(one.startswith("-") for one in requirements) else ()
    return shell("pip", *action.split(), *guard, *requirements)
