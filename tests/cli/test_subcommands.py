"""Commands that have subcommands."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest

from eventloop.cli.command_registry import COMMANDS, WITH_SUBCOMMANDS
from eventloop.cli.subcommands import CommandGroup
from eventloop.errors import UsageError

GROUP = CommandGroup(
    "runs", "usage: eventloop runs", {"list": "lists", "verify": "verifies"}, "End."
)
WITH_ARGUMENT = replace(GROUP, list_argument="RUN")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], ("list", [])),
        (["--json"], ("list", ["--json"])),
        (["list", "--json"], ("list", ["--json"])),
        (["verify", "a", "--json"], ("verify", ["a", "--json"])),
    ],
)
def test_the_first_word_is_the_subcommand_and_list_the_default(argv, expected):
    """`eventloop plugins --json` lists."""
    assert GROUP.split(argv) == expected
    assert WITH_ARGUMENT.split(argv) == expected


def test_an_argument_of_list_needs_no_list(tmp_path, monkeypatch):
    """`eventloop checkpoints RUN`; a folder may be called almost like a subcommand."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "verfy").mkdir()

    assert WITH_ARGUMENT.split(["runs/a", "--json"]) == ("list", ["runs/a", "--json"])
    assert WITH_ARGUMENT.split(["verfy"]) == ("list", ["verfy"])


def test_a_misspelt_subcommand_is_refused_with_the_closest(tmp_path, monkeypatch):
    """It would be taken for a run otherwise."""
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UsageError, match="no subcommand 'verfy'; the closest is 'verify'") as alone:
        GROUP.split(["verfy"])
    with pytest.raises(UsageError, match="'verify', and there is no such run") as of_run:
        WITH_ARGUMENT.split(["verfy"])

    assert str(alone.value).endswith("one of list, verify")
    assert str(of_run.value).endswith("one of list, verify, or the folder of a run")


def test_a_word_that_list_does_not_take_is_refused():
    """However little it resembles a subcommand."""
    with pytest.raises(UsageError, match=r"`eventloop runs` has no subcommand 'tiny\.py'"):
        GROUP.split(["tiny.py"])


@pytest.mark.parametrize("name", WITH_SUBCOMMANDS)
def test_each_subcommand_has_a_module_of_its_name(name):
    """It is found by it, and imported only when it runs."""
    group = importlib.import_module(f"eventloop.cli.{name}").GROUP

    assert name in COMMANDS
    assert group.name == name
    for subcommand in group.subcommands:
        module = importlib.import_module(f"eventloop.cli.{name}_{subcommand}")
        assert module.COMMAND.name == f"{name} {subcommand}"
        assert callable(module.run)
