"""One table of what the trainers of other frameworks and ours add to a step."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benchmarks"
LINE = {"name": "plain", "plain_us": 1234.0, "theirs_us": 100.0, "ours_us": 25.0}


@pytest.fixture
def bridges(clean, monkeypatch):
    """The module benchmarks/bridges.py."""
    monkeypatch.syspath_prepend(PATH)
    return importlib.import_module("bridges")


def test_each_bridge_has_a_benchmark_that_writes_json(bridges):
    """Which is found where the table looks for it."""
    for path in bridges.BRIDGES.values():
        assert "--json" in path.read_text()


def test_a_row_has_both_overheads_and_what_is_counted(bridges):
    """The ratio is ours to theirs, beyond the plain loop."""
    counted = {**LINE, "theirs_reads": 3.0, "ours_reads": 1.0}

    assert bridges.row("transformers", counted) == (
        "| transformers | plain | 1,234 us | 100 us | 25 us | 0.25 | 3 reads and 1 reads |"
    )


def test_the_table_is_printed_and_what_is_not_installed_left_out(
    bridges, tmp_path, monkeypatch, capsys
):
    """Also where a framework writes lines of its own before the numbers."""
    script = tmp_path / "overhead.py"
    script.write_text(f"print('a line [of its own]')\nprint({json.dumps([LINE], indent=1)!r})\n")
    monkeypatch.setattr(bridges, "BRIDGES", {"json": script, "no_such_framework": script})
    monkeypatch.setattr(sys, "argv", ["bridges.py", "--rounds", "1"])

    bridges.main()

    printed = capsys.readouterr().out
    assert "| json | plain | 1,234 us | 100 us | 25 us | 0.25 |" in printed
    assert "no_such_framework is not installed" in printed
