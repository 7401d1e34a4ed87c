"""What `eventloop.commands` and `eventloop_experiments.runs` offer to the authors of commands."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import eventloop.commands
import eventloop_experiments.runs
from eventloop.cli import main
from eventloop.cli.command_registry import COMMANDS, COMMANDS_OF_PACKAGES
from eventloop.fixes import distribution_of

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (one, name)
        for one in (eventloop.commands, eventloop_experiments.runs)
        for name in one.__all__
    ],
)
def test_every_name_is_there_and_on_the_page(module, name):
    """The page on commands is all that an author has to read."""
    assert hasattr(module, name)
    page = (ROOT / "docs" / "how-to" / "add-a-command.md").read_text()
    assert re.search(rf"`{name}\b", page)


def test_it_comes_without_torch(run_python):
    """A command that needs no task starts at once."""
    done = run_python(
        "import sys\nfrom eventloop.commands import Command, UsageError, read_arguments, write_table\n"
        "print('torch' in sys.modules)"
    )

    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.parametrize("name", COMMANDS_OF_PACKAGES)
def test_a_command_without_its_package_says_which_to_install(name, clean, monkeypatch, capsys):
    """The message has the line that brings it."""
    monkeypatch.setattr("importlib_metadata.distributions", lambda **_: iter(()))

    assert main([name, "task.py"]) == 2

    distribution = distribution_of(name)
    assert capsys.readouterr().err == (
        f"UsageError: eventloop {name} is a command of {distribution}, which isn't installed\n"
        f"  fix  install it, `pip install {distribution}`, or from a clone "
        f"`pip install ./plugins/{distribution}`\n"
    )


@pytest.mark.parametrize("name", COMMANDS_OF_PACKAGES)
def test_the_packages_of_known_commands_are_here(name):
    """Control: the message would send a person to a package that has no such command."""
    assert name not in COMMANDS
    text = (ROOT / "plugins" / distribution_of(name) / "pyproject.toml").read_text()
    commands = tomllib.loads(text)["project"]["entry-points"]["eventloop.commands"]
    assert name in commands
