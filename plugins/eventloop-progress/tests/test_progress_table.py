"""The table that grows."""

import io

import pytest
from rich.console import Console

from eventloop_progress.table import ResultsTable


def printed(width, *evaluations):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    table = ResultsTable(console)
    for epoch, results in enumerate(evaluations, 1):
        table.add(epoch, 45 * epoch, results)
    return console.file.getvalue().splitlines()


def results(accuracy, **more):
    return {"test": {"accuracy": accuracy, **more}, "validation": {"accuracy": accuracy / 2}}


def test_evaluations_add_rows_under_one_head():
    """Data loaders are rows, metrics columns, and equal columns stand under each other."""
    lines = printed(80, results(0.5, f1=0.25), results(0.75, f1=0.5))

    assert [line.rstrip() for line in lines] == [
        "epoch      batch  data         accuracy         f1",
        "    1         45  test           0.5000     0.2500",
        "                  validation     0.2500",
        "    2         90  test           0.7500     0.5000",
        "                  validation     0.3750",
    ]


def test_other_metrics_get_a_head_of_their_own():
    """A number under the name of another would be a lie."""
    lines = printed(80, results(0.5), results(0.5, f1=0.5))

    first_words = [line.split()[0] for line in lines]
    assert first_words == ["epoch", "1", "validation", "epoch", "2", "validation"]


LONG = {"an_accuracy_with_a_name_that_goes_on_and_on": 0.125, "[bold]f1": 0.5}


@pytest.mark.parametrize("width", [20, 40, 60])
def test_a_narrow_terminal_gets_a_line_a_number(width):
    """Nothing is cut off: long names are folded, and what looks like markup is printed."""
    lines = printed(width, {"test": LONG})

    whole = "".join(line.split("  ")[0].rstrip() for line in lines)
    assert max(map(len, lines)) <= width
    assert all(f"test/{name}" in whole for name in LONG)
    assert "0.1250" in "\n".join(lines)


def test_nothing_measured_prints_nothing():
    """A task may have eval data loaders and no metric."""
    assert printed(80, {"test": {}}, {}) == []
