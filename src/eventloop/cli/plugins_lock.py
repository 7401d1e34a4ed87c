"""`eventloop plugins lock`: records the plugins with which a project trains."""

from __future__ import annotations

from pathlib import Path

from eventloop.cli.arguments import JSON, Arguments, Command, CommandOption
from eventloop.cli.inspection import read_registry
from eventloop.cli.printing import write_json, write_lines
from eventloop.errors import PluginError, UsageError
from eventloop.plugin.lock_digests import NAME, lock_path, order_digest
from eventloop.plugin.lock_file import check_lock, lock_text

_CHECK = CommandOption(
    "check", "", "compare with the lock instead of writing; status 1 if different"
)
COMMAND = Command(
    "plugins lock",
    f"Writes {NAME} next to pyproject.toml: the plugins that take part, with versions, roles, options, "
    "a digest of each file, and a digest of the order. `eventloop fit` then refuses any difference.",
    (JSON, _CHECK),
    argument="",
)


def run(arguments: Arguments) -> int:
    """Runs the subcommand."""
    _, registry = read_registry(arguments, COMMAND)
    if registry.problems:
        listed = "\n".join(f"{idx}. {problem}" for idx, problem in enumerate(registry.problems, 1))
        raise PluginError(f"plugins with problems can't be locked\n{listed}")
    path = lock_path(Path.cwd())
    if "check" in arguments.given:
        _require_file(path)
        check_lock(path, registry)
        done = "as locked"
    else:
        text = lock_text(registry)
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"{NAME} can't be written: {error.strerror}",
                lock=path,
                fix="move the file or folder of this name, or make its folder writable",
            ) from error
        done = "locked"
    names = [plugin.name for plugin in registry.plugins if plugin.found]
    if "json" in arguments.given:
        digest = order_digest(registry.implementations, passed=False)
        write_json({"lock": str(path), "plugins": names, "order": digest})
    else:
        write_lines([f"{path}: {', '.join(names) or 'no plugins'}, {done}"])
    return 0


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise PluginError(
            f"there is no {NAME} to compare with",
            folder=path.parent,
            fix="write it with `eventloop plugins lock`",
        )
