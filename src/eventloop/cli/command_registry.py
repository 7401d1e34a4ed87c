"""The commands and subcommands: the core's, those of packages, and known ones not installed."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from eventloop.cli.arguments import Arguments, Command, command_help, read_arguments, refuse_flags
from eventloop.cli.printing import write_text
from eventloop.errors import EventloopError, PluginError, UsageError
from eventloop.signals import Terminated

if TYPE_CHECKING:
    from eventloop.plugin.records import Found

COMMAND_GROUP = "eventloop.commands"
# A module of this package each, imported when its command runs: `eventloop plugins` needs neither
# torch nor a task.
COMMANDS = {
    "fit": "train a task",
    "eval": "evaluate a task",
    "predict": "write the outputs for a task's eval data",
    "export": "write the weights of a checkpoint to a file",
    "plugins": "list, inspect, check and lock what is installed; start a new plugin",
}
# Commands that a message can say how to get, with the distributions that have them.
PACKAGES = {
    name: f"eventloop-{name}"
    for name in ("ablate", "check-loss", "checkpoints", "lr-finder", "sweep")
}
# Of `plugins`: `list`, and those of eventloop-plugins, which are commands named `plugins-show` and so on.
SUBCOMMANDS = {
    "list": "what is installed, and whether it takes part",
    "show": "one plugin: options, hooks, edges, import time",
    "order": "in which order plugins are called, and why",
    "hooks": "the hooks that there are, with their contracts",
    "check": "everything that could go wrong; exit status 1 if anything would",
    "enable": "enable an installed plugin, in pyproject.toml",
    "disable": "disable an installed plugin, in pyproject.toml",
    "lock": "write eventloop.lock, from which `fit` then allows no difference",
    "new": "start a plugin: a package with a test that passes",
}
SUBCOMMAND_PREFIX = "plugins-"


def run_core(command: str, argv: Sequence[str]) -> int:
    """Runs a command of the core."""
    subject = importlib.import_module(f"eventloop.cli.{command}")
    if command == "plugins":
        return int(subject.run_subcommand(argv))
    return run_command(subject.COMMAND, subject.run, argv)


def run_command(command: Command, run: Callable[[Arguments], int], argv: Sequence[str]) -> int:
    """Reads a command line, and runs its command or writes its help; returns the exit status."""
    if not command.takes_task:
        gc.enable()
    arguments = read_arguments(argv, command)
    if "help" not in arguments.given:
        if not (command.takes_plugins and command.takes_options):
            refuse_flags(arguments, command)
        return run(arguments)
    if command.takes_task:
        from eventloop.cli.job import job_help  # which needs torch

        write_text(job_help(arguments, command))
    else:
        write_text(command_help(command))
    return 0


def run_added(name: str, argv: Sequence[str]) -> int:
    """Runs a command that a package adds.

    Args:
        argv: the arguments after its name.

    Returns:
        Its exit status; it may also raise SystemExit, as argparse does.

    Raises:
        UsageError: no package has such a command.
        PluginError: two packages have it, it can't be imported, or returns no exit status.
    """
    from eventloop.plugin.load import imported_callable

    found = _find(name)
    command = imported_callable(found)
    gc.enable()
    try:
        status = command([*argv])
    except (Terminated, EventloopError):
        raise
    except SystemExit as error:
        if getattr(error, "__notes__", ()) or not isinstance(error.code, int | None):
            raise  # of a plugin, or with a text that is still to be shown
        return error.code or 0
    except Exception as error:
        error.add_note(f"raised by command {found.origin}")
        raise
    if not isinstance(status, int):
        raise PluginError(
            f"command {found.name!r} returned {status!r}, which is not an exit status",
            plugin=found.origin,
            fix="return 0 for success, 1 for failure",
        )
    return status


def help_lines() -> Iterator[str]:
    """Describes all commands, one line each; those of packages by their metadata's summary."""
    from eventloop.plugin.discover import summary_of
    from eventloop.safe_text import one_line

    described = dict(COMMANDS)
    found, problems = _added()
    for one in found:
        if one.name.startswith(SUBCOMMAND_PREFIX):
            continue
        about = summary_of(one.entry_point.dist) if one.entry_point.dist is not None else ""
        about = problems[one].what if one in problems else f"{about} ({one.distribution})".strip()
        described.setdefault(one.name, about)
    for name, distribution in PACKAGES.items():
        described.setdefault(name, f"comes with {distribution}, which isn't installed")
    width = max(map(len, described))
    for name, about in described.items():
        yield one_line(f"  {name:<{width}}  {about}")


def _added() -> tuple[tuple[Found, ...], dict[Found, PluginError]]:
    """Returns the commands that packages add, and their problems."""
    from eventloop.plugin.discover import extensions  # reads metadata: `eventloop fit` needn't
    from eventloop.plugin.name_problems import extension_problems

    found = extensions(COMMAND_GROUP)
    return found, extension_problems(found, {"command": COMMANDS})


def _find(name: str) -> Found:
    from eventloop import vocabulary
    from eventloop.fixes import install, shell
    from eventloop.naming import fold

    found, problems = _added()
    for one in found:
        if fold(one.name) == fold(name):
            if one in problems:
                raise problems[one]
            return one
    is_subcommand = name in (f"{SUBCOMMAND_PREFIX}{one}" for one in SUBCOMMANDS if one != "list")
    package = "plugins" if is_subcommand else name.replace("_", "-")
    if is_subcommand or package in PACKAGES:
        raise UsageError(
            f"eventloop {name.replace(SUBCOMMAND_PREFIX, 'plugins ')} is a command of "
            f"eventloop-{package}, which isn't installed",
            fix=install(package),
        )
    if name.endswith(".py"):
        raise UsageError(
            f"{name!r} isn't a command", fix=f"write {shell('eventloop', 'fit', name)}"
        )
    names = [*COMMANDS, *(one.name for one in found if one not in problems), *PACKAGES]
    names = [one for one in names if not one.startswith(SUBCOMMAND_PREFIX)]
    here = {word: f"`eventloop {command}`" for word, command in vocabulary.COMMAND_WORDS.items()}
    raise UsageError(
        f"there is no command {name!r}{vocabulary.known_as(name.lower(), here, names)}",
        fix=f"one of {', '.join(dict.fromkeys(names))}, as in `eventloop fit examples/digits.py`",
    )
