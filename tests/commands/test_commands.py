"""What `eventloop.commands` offers to the authors of commands."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

import eventloop.commands
from eventloop.cli import main
from eventloop.cli.registry import COMMANDS, PACKAGES
from eventloop.commands import RunProcesses, RunsFolder

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Failing:
    """A run that leaves its reason in its log, where it isn't stopped before."""

    place = Path("failing")
    argv = ("fit", "nowhere.py")


@pytest.mark.parametrize("name", eventloop.commands.__all__)
def test_every_name_is_there_and_on_the_page(name):
    """The page on commands is all that an author has to read."""
    assert hasattr(eventloop.commands, name)
    page = (ROOT / "docs" / "how-to" / "add-a-command.md").read_text()
    assert re.search(rf"`{name}\b", page)


def test_it_comes_without_torch(run_python):
    """A command that needs no task starts at once."""
    done = run_python(
        "import sys\nfrom eventloop.commands import Command, UsageError, read_arguments, write_table\n"
        "print('torch' in sys.modules)"
    )

    assert (done.stdout, done.stderr) == ("False\n", "")


def test_a_run_that_starts_while_a_signal_arrives_is_stopped_too(tmp_path):
    """Otherwise the command would wait for it to train to its end."""
    folder = RunsFolder(tmp_path, "trial")

    def runs():
        os.kill(os.getpid(), signal.SIGTERM)
        yield Failing()

    with RunProcesses(folder) as processes:
        assert list(processes.outcomes(runs())) == []

    assert folder.log(Failing()).read_text() == ""
    assert str(processes.stopped("1 run is left")) == "terminated: 1 run is left"


@pytest.mark.parametrize("name", PACKAGES)
def test_a_command_without_its_package_says_which_to_install(name, clean, monkeypatch, capsys):
    """The message has the line that brings it."""
    monkeypatch.setattr("eventloop.plugin.metadata.installed_entry_points", lambda: ([], []))

    assert main([name, "task.py"]) == 2

    assert capsys.readouterr().err == (
        f"UsageError: eventloop {name} is a command of {PACKAGES[name]}, which isn't installed\n"
        f"  fix  python -m pip install {PACKAGES[name]}\n"
    )


@pytest.mark.parametrize(("name", "distribution"), PACKAGES.items())
def test_the_packages_of_known_commands_are_here(name, distribution):
    """Control: the table would send a person to a package that has no such command."""
    assert name not in COMMANDS
    text = (ROOT / "plugins" / distribution / "pyproject.toml").read_text()
    assert f'[project.entry-points."eventloop.commands"]\n{name} = ' in text
