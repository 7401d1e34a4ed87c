"""The core's commands and the commands of packages, installed or not."""

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
# Each command has a module in this package, which is imported only when the command runs: `eventloop
# plugins` needs neither torch nor a task.
COMMANDS = {
    "fit": "train a task",
    "eval": "evaluate a task",
    "predict": "write the outputs for a task's eval data",
    "export": "write the weights of a checkpoint to a file",
    "checkpoints": "list the checkpoints of a run, verify them, compare two",
    "plugins": "list, inspect, check and lock installed plugins; start a new plugin",
}
# Commands with subcommands.
WITH_SUBCOMMANDS = ("checkpoints", "plugins")
# Commands of this repository's packages. They are listed even if they aren't installed. Their
# descriptions are here because a package's summary describes the whole package.
COMMANDS_OF_PACKAGES = {
    "ablate": "show the effect of algorithms, by runs with and without them",
    "check-loss": "find a loss that microbatches, padding, ranks or the order of samples change",
    "lr-finder": "propose a learning rate, from a short run in which it grows",
    "sweep": "search for the best options of a task, its settings and its plugins",
}


def run_core(command: str, argv: Sequence[str]) -> int:
    """Runs a command of the core."""
    module = importlib.import_module(f"eventloop.cli.{command}")
    if command in WITH_SUBCOMMANDS:
        if argv[:1] in (["-h"], ["--help"]):
            write_text(module.GROUP.help())
            return 0
        subcommand, argv = module.GROUP.split(argv)
        module = importlib.import_module(f"eventloop.cli.{command}_{subcommand}")
    return run_command(module.COMMAND, module.run, argv)


def run_command(command: Command, run: Callable[[Arguments], int], argv: Sequence[str]) -> int:
    """Parses a command line, and runs the command or writes its help; returns the exit status."""
    if not command.takes_task:
        gc.enable()
    arguments = read_arguments(argv, command)
    if "help" not in arguments.given:
        if not (command.takes_plugins and command.takes_options):
            refuse_flags(arguments, command)
        return run(arguments)
    if command.takes_task:
        from eventloop.cli.job import job_help  # imports torch

        write_text(job_help(arguments, command))
    else:
        write_text(command_help(command))
    return 0


def run_added(name: str, argv: Sequence[str]) -> int:
    """Runs a command that a package adds.

    Args:
        name: the name of the command.
        argv: the arguments after the name.

    Returns:
        The exit status. The command may also raise SystemExit, as argparse does.

    Raises:
        UsageError: no package has a command of this name.
        PluginError: two packages have it, it can't be imported, or it returns no exit status.
    """
    from eventloop.plugin.load import imported_callable

    command = _find(name)
    run = imported_callable(command)
    gc.enable()
    try:
        status = run([*argv])
    except (Terminated, EventloopError):
        raise
    except SystemExit as error:
        if getattr(error, "__notes__", ()) or not isinstance(error.code, int | None):
            raise  # raised by a plugin, or with a text that must be shown
        return error.code or 0
    except Exception as error:
        error.add_note(f"raised by command {command.origin}")
        raise
    if not isinstance(status, int):
        raise PluginError(
            f"command {command.name!r} returned {status!r}, which is not an exit status",
            plugin=command.origin,
            fix="return 0 for success, 1 for failure",
        )
    return status


def help_lines() -> Iterator[str]:
    """Describes each command in a line; packages' commands are described by their metadata."""
    from eventloop.fixes import distribution_of
    from eventloop.safe_text import one_line

    descriptions = dict(COMMANDS)
    added, problems = _added()
    for command in added:
        if command in problems:
            description = problems[command].what
        else:
            description = f"{_description(command)} ({command.distribution})".strip()
        descriptions.setdefault(command.name, description)
    for name, description in COMMANDS_OF_PACKAGES.items():
        missing = f"{distribution_of(name)}, which isn't installed"
        descriptions.setdefault(name, f"{description} ({missing})")
    width = max(map(len, descriptions))
    for name, description in descriptions.items():
        yield one_line(f"  {name:<{width}}  {description}")


def _description(command: Found) -> str:
    """Returns a command's description, from its distribution's summary; "" if there is none."""
    from eventloop.fixes import distribution_of
    from eventloop.plugin.discover import summary_of

    distribution = command.entry_point.dist
    is_of_repository = command.distribution == distribution_of(command.name)
    if is_of_repository and command.name in COMMANDS_OF_PACKAGES:
        return COMMANDS_OF_PACKAGES[command.name]
    return "" if distribution is None else summary_of(distribution)


def _added() -> tuple[tuple[Found, ...], dict[Found, PluginError]]:
    """Returns the commands that packages add, and their problems."""
    from eventloop.plugin.discover import extensions  # `eventloop fit` needn't read metadata
    from eventloop.plugin.name_problems import extension_problems

    commands = extensions(COMMAND_GROUP)
    return commands, extension_problems(commands, {"command": COMMANDS})


def _find(name: str) -> Found:
    from eventloop import vocabulary
    from eventloop.fixes import distribution_of, install, shell
    from eventloop.naming import fold

    added, problems = _added()
    for command in added:
        if fold(command.name) == fold(name):
            if command in problems:
                raise problems[command]
            return command
    if name.replace("_", "-") in COMMANDS_OF_PACKAGES:
        raise UsageError(
            f"eventloop {name} is a command of {distribution_of(name)}, which isn't installed",
            fix=install(name),
        )
    if name.endswith(".py"):
        raise UsageError(
            f"{name!r} isn't a command", fix=f"write {shell('eventloop', 'fit', name)}"
        )
    usable = [command.name for command in added if command not in problems]
    names = [*COMMANDS, *usable, *COMMANDS_OF_PACKAGES]
    commands_of_words = {
        word: f"`eventloop {command}`" for word, command in vocabulary.COMMAND_WORDS.items()
    }
    raise UsageError(
        f"there is no command {name!r}{vocabulary.known_as(name.lower(), commands_of_words, names)}",
        fix=f"one of {', '.join(dict.fromkeys(names))}, as in `eventloop fit examples/digits.py`",
    )
