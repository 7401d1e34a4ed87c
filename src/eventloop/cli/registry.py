"""Which commands and subcommands there are: the core's, those of packages, those not installed."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from eventloop.cli.arguments import command_help, read_arguments, refuse_flags
from eventloop.cli.output import write_text
from eventloop.errors import EventloopError, PluginError, UsageError, closest
from eventloop.signals import Interrupted, Terminated

if TYPE_CHECKING:
    from eventloop.plugin.records import Found

GROUP = "eventloop.commands"
# A module of this package each, imported when its command runs: `eventloop plugins` and
# `eventloop checkpoints` need neither torch nor a task.
COMMANDS = {
    "fit": "train a task",
    "eval": "evaluate a task",
    "predict": "write the outputs for a task's eval data",
    "checkpoints": "list a run's checkpoints, verify them, compare two",
    "export": "write the weights of a checkpoint to a file",
    "plugins": "list, inspect, check and lock what is installed; start a new plugin",
}


class Group(NamedTuple):
    """A command that has subcommands, of which `list` runs where none is named.

    Args:
        usage: how it is written.
        about: what it does, in a sentence.
        subcommands: what each does. A module each, imported when it runs: few need torch or plugins.
        more: what else its help says.
        takes_run: whether a run may stand in the place of the subcommand.
    """

    usage: tuple[str, ...]
    about: str
    subcommands: Mapping[str, str]
    more: str
    takes_run: bool = False


GROUPS = {
    "checkpoints": Group(
        ("eventloop checkpoints RUN", "eventloop checkpoints SUBCOMMAND ..."),
        "Lists the checkpoints of a run, verifies them, and compares two.",
        {
            "list": "a run's checkpoints: when saved, how large, whether they verify, metrics, plugins",
            "verify": "which files aren't what was written; exit status 4 if any isn't",
            "diff": "what differs between two: configuration, plugins, tensors; exit status 1 if "
            "anything",
        },
        "RUN is a run's folder or URL, or the `checkpoints` in it. Where one checkpoint is wanted, a run "
        "stands\nfor its newest that verifies. `eventloop checkpoints SUBCOMMAND --help` tells more.",
        takes_run=True,
    ),
    "plugins": Group(
        ("eventloop plugins [SUBCOMMAND] ...",),
        "Shows what is installed, what takes part, and in which order.",
        {
            "list": "what is installed, and whether it takes part",
            "show": "one plugin: options, hooks, edges, import time",
            "order": "who is called when, and why in this order",
            "hooks": "the hooks that there are, with their contracts",
            "check": "everything that could go wrong; exit status 1 if anything would",
            "enable": "have an installed plugin take part, in pyproject.toml",
            "disable": "have an installed plugin take part no more, in pyproject.toml",
            "lock": "write eventloop.lock, from which `fit` then allows no difference",
            "new": "start a plugin: a package with a test that passes",
        },
        "`eventloop plugins SUBCOMMAND --help` tells more; `--json` makes a table JSON; "
        "`-p` and `--no-plugins` choose as for `fit`.",
    ),
}
# Commands that a message can say how to get, with the distributions that have them.
PACKAGES = {name: f"eventloop-{name}" for name in ("ablate", "lr-finder", "sweep")}


def run_core(command: str, argv: Sequence[str]) -> int:
    """Runs a command of the core; of one with subcommands that which is named first, else `list`.

    Raises:
        UsageError: it has no such subcommand.
    """
    module, rest = f"eventloop.cli.{command}", list(argv)
    if command in GROUPS:
        group, name = GROUPS[command], "list"
        if rest in (["-h"], ["--help"]):
            write_text(_group_help(group))
            return 0
        if rest and rest[0] in group.subcommands:
            name, *rest = rest
        elif rest and not rest[0].startswith("-"):
            _refuse_subcommand(command, group, rest[0])
        module = f"{module}.{name}"
    subject = importlib.import_module(module)
    if not subject.COMMAND.takes_task:
        gc.enable()
    arguments = read_arguments(rest, subject.COMMAND)
    if "help" not in arguments.given:
        if not (subject.COMMAND.takes_plugins and subject.COMMAND.takes_options):
            refuse_flags(arguments, subject.COMMAND)
        status: int = subject.run(arguments)
        return status
    if subject.COMMAND.takes_task:
        from eventloop.cli.job import job_help  # which needs torch

        write_text(job_help(arguments, subject.COMMAND))
    else:
        write_text(command_help(subject.COMMAND))
    return 0


def _refuse_subcommand(command: str, group: Group, word: str) -> None:
    near = closest(word, group.subcommands)
    if group.takes_run and (Path(word).exists() or not near):
        return
    or_run = (
        (", and there is no such run", ", or the folder of a run") if group.takes_run else ("", "")
    )
    raise UsageError(
        f"`eventloop {command}` has no subcommand {word!r}{near}{or_run[0]}",
        fix=f"one of {', '.join(group.subcommands)}{or_run[1]}",
    )


def _group_help(group: Group) -> str:
    usage = "\n".join(f"{'       ' * (idx > 0)}{one}" for idx, one in enumerate(group.usage))
    width = max(map(len, group.subcommands))
    listed = "\n".join(f"  {name:<{width}}  {what}" for name, what in group.subcommands.items())
    return f"usage: {usage}\n\n{group.about}\n\nsubcommands:\n{listed}\n\n{group.more}"


def run_added(name: str, argv: Sequence[str]) -> int:
    """Runs a command that a package adds.

    Args:
        argv: what follows its name.

    Returns:
        Its exit status, which it may also exit with, as argparse does.

    Raises:
        UsageError: no package has such a command.
        PluginError: two have, or it can't be imported, or returns no exit status.
    """
    from eventloop.plugin.extensions import imported_callable

    found = _find(name)
    command = imported_callable(found)
    gc.enable()
    try:
        status = command([*argv])
    except (Interrupted, Terminated, EventloopError):
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
    """Describes all commands, a line each; those of packages in the words of their metadata."""
    from eventloop.plugin.metadata import summary
    from eventloop.text import one_line

    described = dict(COMMANDS)
    found, problems = _added()
    for one in found:
        about = summary(one.entry_point.dist) if one.entry_point.dist is not None else ""
        about = problems[one].what if one in problems else f"{about} ({one.distribution})".strip()
        described.setdefault(one.name, about)
    for name, distribution in PACKAGES.items():
        described.setdefault(name, f"comes with {distribution}, which isn't installed")
    width = max(map(len, described))
    for name, about in described.items():
        yield one_line(f"  {name:<{width}}  {about}")


def _added() -> tuple[tuple[Found, ...], dict[Found, PluginError]]:
    """Returns the commands that packages add, and what is wrong with some of them."""
    from eventloop.plugin.extensions import extension_problems
    from eventloop.plugin.metadata import extensions  # reads metadata: `eventloop fit` needn't

    found = extensions(GROUP)
    return found, extension_problems(found, {"command": COMMANDS})


def _find(name: str) -> Found:
    from eventloop.naming import fold
    from eventloop.text import install, shell

    found, problems = _added()
    for one in found:
        if fold(one.name) == fold(name):
            if one in problems:
                raise problems[one]
            return one
    if distribution := PACKAGES.get(name.replace("_", "-")):
        raise UsageError(
            f"eventloop {name} is a command of {distribution}, which isn't installed",
            fix=install(name),
        )
    if name.endswith(".py"):
        raise UsageError(
            f"{name!r} isn't a command", fix=f"write {shell('eventloop', 'fit', name)}"
        )
    names = [*COMMANDS, *(one.name for one in found if one not in problems), *PACKAGES]
    raise UsageError(
        f"there is no command {name!r}{closest(name, names)}",
        fix=f"one of {', '.join(dict.fromkeys(names))}, as in `eventloop fit examples/digits.py`",
    )
