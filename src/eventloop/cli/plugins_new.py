"""`eventloop plugins new NAME`: creates a plugin package that installs and passes its test."""

from __future__ import annotations

import importlib
import keyword
import sys
from collections.abc import Iterator
from pathlib import Path

import eventloop
from eventloop.cli.arguments import JSON, Arguments, Command, CommandOption
from eventloop.cli.command_registry import COMMANDS
from eventloop.cli.printing import write_json, write_lines
from eventloop.config.settings import SETTING_NAMES
from eventloop.errors import UsageError, closest
from eventloop.fixes import published
from eventloop.naming import camel, fold
from eventloop.plugin.discover import discover, extensions
from eventloop.plugin.name_problems import is_usable_name
from eventloop.plugin.records import GROUP_OF

# The files of both roles, and of each role; words between @ are replaced.
_TEMPLATES = Path(__file__).with_name("templates")

COMMAND = Command(
    "plugins new",
    "Creates the folder eventloop-NAME with a complete plugin: pyproject.toml, README, source and a "
    "test that passes.",
    (CommandOption("role", "algorithm|callback", "the plugin's role (default: callback)"), JSON),
    argument="NAME",
    takes_plugins=False,
    takes_options=False,
)


def run(arguments: Arguments) -> int:
    """Runs the subcommand."""
    name = _name(arguments.task)
    role = arguments.given.get("role", "callback")
    if role not in GROUP_OF:
        raise UsageError(
            f"--role is {role!r}{closest(role, GROUP_OF)}",
            fix="write --role algorithm for a plugin that changes the training, --role callback for "
            "a plugin that only watches",
        )
    folder = Path(f"eventloop-{name}")
    if folder.exists():
        raise UsageError(f"{folder} exists", fix="remove it, or choose another NAME")
    written = _write(folder, name, role)
    if "json" in arguments.given:
        write_json({"folder": str(folder), "files": [str(path) for path in written]})
    else:
        write_lines(
            [*map(str, written), "", f'try it: `python -m pip install -e "./{folder}[test]"`, then']
        )
        write_lines([f"`python -m pytest {folder}` and `eventloop plugins show {name}`"])
    return 0


def _name(typed_name: str) -> str:
    name = fold(typed_name).replace("_", "-").removeprefix("eventloop-")
    if not is_usable_name(name) or not name[0].isalpha():
        raise UsageError(
            f"a plugin can't be named {typed_name!r}" if typed_name else "a plugin needs a NAME",
            fix="use letters, digits and single dashes, as in `eventloop plugins new demo`",
        )
    if existing_use := _taken(name):
        raise UsageError(
            f"a plugin can't be named {typed_name!r}: {existing_use}",
            fix=f"choose another NAME, as in `eventloop plugins new my-{name}`",
        )
    return name


def _taken(name: str) -> str:
    """Returns a clause that says what already uses a name, or ""."""
    key = fold(name)
    if key in SETTING_NAMES:
        return "a setting has this name"
    commands = (
        importlib.import_module(f"eventloop.cli.{command}")
        for command in ("fit", "eval", "predict")
    )
    if any(
        key in command.COMMAND.all_options() for command in commands
    ):  # importing them takes torch
        return "an option of the command has this name"
    if key in sys.stdlib_module_names or {key, camel(name)} & {*keyword.kwlist}:
        return "Python has this name"
    if key in ("torch", "eventloop") or camel(name) in eventloop.__all__:
        return "torch or eventloop has this name"
    if key in map(fold, COMMANDS):
        return "a command has this name"
    if name in published():
        return f"the package {published()[name]} uses this name"
    for plugin in (*discover()[0], *extensions()):
        if fold(plugin.name) == key:
            return f"{plugin.origin} has this name"
    return ""


def _write(folder: Path, name: str, role: str) -> list[Path]:
    words = {
        "@RANGE@": _range(eventloop.__version__),
        "@NAME@": name,
        "@PACKAGE@": f"eventloop_{fold(name)}",
        "@CLASS@": camel(name),
        "@GROUP@": GROUP_OF[role],
        "@ROLE@": role,
    }
    written = []
    for path, template in sorted((*_files("both"), *_files(role))):
        text = template.read_text("utf-8")
        for word, value in words.items():
            text = text.replace(word, value)
        target = folder / path.replace("PACKAGE", words["@PACKAGE@"])
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        written.append(target)
    return written


def _files(role: str) -> Iterator[tuple[str, Path]]:
    """Yields (path in the new package, template) for each file."""
    root = _TEMPLATES / role
    for template in root.rglob("*.txt"):
        yield template.relative_to(root).as_posix().removesuffix(".txt"), template


def _range(version: str) -> str:
    """Returns the version range that a new plugin requires: before 1.0, a single minor version."""
    major, minor, *_ = map(int, version.split(".")[:2])
    following = f"0.{minor + 1}" if major == 0 else str(major + 1)
    return f">={major}.{minor},<{following}"
