"""The command of the page on commands: written, installed and run as the page says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from eventloop.cli import main
from eventloop.commands import FAILURE

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "add-a-command.md"
TASK = """
import torch
from eventloop import Task


def task(lr: float = 0.1):
    return Task(
        model=lambda: torch.nn.Linear(3, 3),
        loss=torch.nn.functional.cross_entropy,
        train_dataloader=[(torch.eye(3), torch.arange(3))] * 3,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
        settings={"max_duration": "2ep", "device": "cpu"},
    )
"""


@pytest.fixture
def grid(clean, install):
    """The page's package, installed, beside a task."""
    blocks = dict(re.findall(r"```(toml|python)\n(.*?)```", PAGE.read_text(), re.DOTALL))
    project = tomllib.loads(blocks["toml"])["project"]
    (points,) = project["entry-points"].items()
    group, ((name, value),) = points[0], points[1].items()
    install(
        name,
        blocks["python"],
        group=group,
        target=f":{value.partition(':')[2]}",
        distribution=project["name"],
        summary=project["description"],
    )
    (clean / "tiny.py").write_text(TASK)


@pytest.mark.nightly
def test_the_page_s_command_runs_goes_on_and_reports_what_failed(grid, capfd):
    """What authors copy is the pattern of each command that trains several times."""
    line = ("grid", "tiny.py", "--no-plugins", "--run-dir", "here", "--lrs")

    assert main([*line, "0,0.5"]) == 0
    first = [one.split() for one in capfd.readouterr().out.splitlines()]
    written = Path("here/lr-0.json").stat().st_mtime_ns
    assert main([*line, "0,oops,0.5"]) == FAILURE
    second = [one.split() for one in capfd.readouterr().out.splitlines()]

    assert [one[0] for one in first] == ["lr", "0", "0.5"]
    assert float(first[1][1]) > float(first[2][1])
    assert (second[1], second[3]) == (first[1], first[2])
    assert second[2][:2] == ["oops", "SettingError:"]
    assert Path("here/lr-0.json").stat().st_mtime_ns == written


def test_the_page_s_command_is_described(grid, capfd):
    """By its package's description, and by its own help."""
    assert main(["--help"]) == 0
    assert re.search(
        r"^  grid +train with several learning rates \(eventloop-grid\)$",
        capfd.readouterr().out,
        re.MULTILINE,
    )
    assert main(["grid", "tiny.py", "--help", "--no-plugins"]) == 0
    assert "--lrs NUMBERS" in capfd.readouterr().out


def test_a_changed_line_is_refused_in_the_same_folder(grid, capfd):
    """Runs of one table must be comparable."""
    Path("here").mkdir()
    Path("here/grid.json").write_text(
        '{"task": {}, "settings": {"seed": 3}, "command": {}, "plugins": []}'
    )

    assert main(["grid", "tiny.py", "--no-plugins", "--run-dir", "here", "--seed", "4"]) == 2

    assert "settings.seed: 3 -> 4" in capfd.readouterr().err
