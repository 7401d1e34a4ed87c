"""Commands that messages propose: safe to paste, whatever packages, plugins and paths are called."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import eventloop
from eventloop.errors import text_of
from eventloop.fixes import for_command, pip, shell, switch_off
from eventloop.plugin.assemble import unexpected
from eventloop.plugin.load import _problem
from eventloop.plugin.name_problems import _several, _unusable
from eventloop.plugin.records import FROM_ENTRY_POINT, Found, Plugin

SOURCE = Path(eventloop.__file__).parent
HOSTILE = (
    "x; rm -rf ~",
    "$(rm -rf ~)",
    "`rm -rf ~`",
    "x && y | z > w",
    "it's",
    '"quoted"',
    "two\nlines",
    "\x1b[31mred",
    "*",
    "",
)
# Variables that may appear between backticks without the helpers: names of ours, Python's code, and values
# that can't hold anything else.
OURS = {
    "STATE",  # in view: the words of other trainers
    "SUFFIX",
    "TIMEOUT_VARIABLE",
    "as_python",  # in config/option_types: a value as Python writes it, quoted
    "command",
    "contradicted",  # in cli/fit_options: the name of an option of ours
    "example",
    "extension",  # in plugin/load: a line of Python's metadata
    "first_name",  # in plugin/validate: a parameter of a method
    "flag",
    "folder",
    "impl",
    "longer",  # in trainer: a time, as text
    "name",
    "option",
    "path",
    "self",  # in plugin/records: `--limit 5` and such, set by us
    "shlex",
    "similar_name",  # in view: an attribute of the State
    "str",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize(
    ("make", "start"),
    [
        (lambda name: shell("eventloop", name), ["eventloop"]),
        (lambda name: switch_off(f"a{name}"), ["-p"]),
        (lambda name: pip("install", f"a{name}"), ["pip", "install"]),
        (lambda name: pip("install --force-reinstall", f"a{name}"), ["pip", "install"]),
    ],
)
def test_a_name_is_one_word(make, start, name):
    """A shell reads the words that were meant, on one line, and nothing else."""
    with for_command():
        text = make(name)

    assert (text[0], text[-1]) == ("`", "`")
    assert text.isprintable()
    words = shlex.split(text[1:-1])
    assert words[: len(start)] == start
    assert len(words) == 2 if start == ["eventloop"] else len(words) <= 4


def test_a_name_like_an_option_is_no_option():
    """The metadata of a package may say that it is called `--index-url=x`."""
    assert pip("uninstall", "--index-url=x") == "`pip uninstall -- --index-url=x`"


@pytest.mark.parametrize("name", ["x; rm -rf ~", "x && y", "x | z > w", "it's; y"])
def test_a_hostile_package_proposes_nothing_else(name):
    """Messages about plugins, with its name and that of its distribution."""
    entry_point = EntryPoint(name, "module:Plugin", "eventloop.algorithms")
    found = Found(name, "algorithm", entry_point, name, "1.0")
    plugin = Plugin(name, "algorithm", object(), name, "1.0", source=FROM_ENTRY_POINT)
    with for_command():
        messages = [
            text_of(_problem(found, ImportError("no"))),
            text_of(_several([found, found])),
            text_of(_unusable(found)),
            text_of(unexpected(found, ValueError("no"))),
            plugin.fix("fix it"),
        ]

    for message in messages:
        commands = message.split("`")[1::2]
        assert commands
        for command in commands:
            tokens = list(shlex.shlex(command, posix=True, punctuation_chars=True))
            assert not set("".join(tokens[0:1])) & set(";&|<>")
            assert all(set(token) - set(";&|<>") for token in tokens), command


def between_backticks(tree: ast.AST) -> Iterator[ast.FormattedValue]:
    """Yields what f-strings put between backticks."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.JoinedStr):
            continue
        num_ticks = 0
        for part in node.values:
            if isinstance(part, ast.Constant):
                num_ticks += str(part.value).count("`")
            elif isinstance(part, ast.FormattedValue) and num_ticks % 2:
                yield part


def test_names_from_outside_go_through_the_helpers():
    """A command in an f-string holds names of ours alone; a new one shows up here."""
    found = []
    for path in set(SOURCE.rglob("*.py")) - {SOURCE / "fixes.py"}:
        for part in between_backticks(ast.parse(path.read_text(encoding="utf-8"))):
            names = {one.id for one in ast.walk(part.value) if isinstance(one, ast.Name)}
            if not names <= OURS:
                found.append(f"{path.relative_to(SOURCE)}:{part.lineno}: {ast.unparse(part.value)}")

    assert found == []
