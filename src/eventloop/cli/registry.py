"""Which commands there are: the core's own, those that packages add, and those of known packages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

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
# Commands that a message can say how to get, with the distributions that have them.
PACKAGES = {"ablate": "eventloop-ablate"}


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

    found, problems = _added()
    for one in found:
        if fold(one.name) == fold(name):
            if one in problems:
                raise problems[one]
            return one
    if fold(name) in PACKAGES:
        distribution = PACKAGES[fold(name)]
        raise UsageError(
            f"eventloop {name} is a command of {distribution}, which isn't installed",
            fix=f"python -m pip install {distribution}",
        )
    names = [*COMMANDS, *(one.name for one in found if one not in problems), *PACKAGES]
    raise UsageError(
        f"there is no command {name!r}{closest(name, names)}",
        fix=f"one of {', '.join(dict.fromkeys(names))}, as in `eventloop fit examples/digits.py`",
    )
