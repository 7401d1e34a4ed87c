"""The table of an ablation: what its cells and notes say."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from eventloop_experiments.ablate.ablation_runs import Outcome, Run
from eventloop_experiments.ablate.table import content_of, footnotes, rows_of, write_rows
from eventloop_experiments.ablate.variants import variants_of
from eventloop_experiments.runs import Metric

METRIC = Metric("test/accuracy", True)
VALUES = {"none": [0.90, 0.94, 0.92], "ema": [0.91, 0.96, 0.935]}


@pytest.fixture
def table():
    """Makes the rows of an ablation of `ema` from the values of its runs; None failed."""

    def table(values=VALUES, jobs=1, off=()):
        variants = variants_of(("ema",))
        outcomes = [
            Outcome(
                Run(variant, seed, ()),
                None if value is None else content(value, off if variant.algorithms else ()),
                "RuntimeError: no luck" if value is None else "",
                Path("here", f"{variant.name}.log"),
            )
            for variant in variants
            for seed, value in enumerate(values[variant.name])
        ]
        seeds = tuple(range(len(values["none"])))
        ablation = SimpleNamespace(
            names=("ema",), variants=variants, seeds=seeds, jobs=jobs, folder=Path("here"),
            arguments=SimpleNamespace(task="tiny.py"),
        )  # fmt: skip
        return ablation, rows_of(ablation, outcomes, METRIC)

    return table


def content(value, off):
    is_nan = math.isnan(value)
    return {
        "metrics": {"test/accuracy": None if is_nan else value},
        "step_s": None if is_nan else value / 100,
        "peak_memory_bytes": 0 if is_nan else round(value * 1e9),
        "off": dict(off),
    }


def test_a_row_has_mean_deviation_difference_time_and_memory(table, capsys):
    """As many digits as the deviations have something to say with."""
    write_rows(table()[1], METRIC)
    none, ema = capsys.readouterr().out.splitlines()[1:]

    assert none.split() == ["none", "0.920", "±", "0.020", "9.20", "ms", "940", "MB"]
    assert ema.split() == [
        "ema", "0.935", "±", "0.025", "+0.015", "[+0.003,", "+0.027]*", "9.35", "ms", "960", "MB",
    ]  # fmt: skip


def test_a_seed_that_failed_leaves_the_others(table, capsys):
    """The row says of how many it is, the notes why."""
    ablation, rows = table({"none": [0.90, 0.94, 0.92], "ema": [0.91, None, 0.935]})
    write_rows(rows, METRIC)

    out = capsys.readouterr().out
    assert "(2 of 3 seeds)" in out
    assert rows[1].differences["none"].num_seeds == 2
    assert "failed: ema, seed 1: RuntimeError: no luck; here/ema.log" in [
        *footnotes(ablation, rows, METRIC)
    ]


def test_a_value_that_is_not_finite_is_shown_as_such(table, capsys):
    """A run that diverged isn't a run that is missing."""
    rows = table({"none": [0.9, 0.8], "ema": [float("nan"), 0.8]})[1]
    write_rows(rows, METRIC)

    assert "nan" in capsys.readouterr().out


def test_the_notes_say_what_the_numbers_cannot(table):
    """The table alone would mislead."""
    assert "1 seed" not in str([*footnotes(*table(), METRIC)])
    one_seed = [*footnotes(*table({"none": [0.9], "ema": [0.8]}), METRIC)]
    assert one_seed == ["one seed shows no difference: give --seeds 5"]
    at_once = [*footnotes(*table(jobs=2), METRIC)]
    assert at_once[1].startswith("2 runs shared the cores")
    stood_off = [*footnotes(*table(off={"ema": "no images"}.items()), METRIC)]
    assert stood_off[1:] == ["no part in ema: ema (no images)"]


def test_the_notes_say_where_lower_is_better(table):
    """The metric's name may not."""
    told = [*footnotes(*table(), Metric("test/mse", False))]

    assert told[0] == "test/mse: lower is better, and a difference below 0"


def test_a_small_metric_of_one_seed_has_digits(table, capsys):
    """There is no deviation that says how many."""
    write_rows(table({"none": [5.801e-05], "ema": [1.5e-04]})[1], METRIC)

    out = capsys.readouterr().out
    assert "0.00005801" in out
    assert "+0.00009199" in out


def test_json_has_every_run(table):
    """A program makes its own table."""
    row = content_of(*table(), METRIC)["rows"][1]

    assert row["mean"] == pytest.approx(0.935)
    assert [run["value"] for run in row["runs"]] == VALUES["ema"]
    assert list(row["against"]["none"]) == ["mean", "low", "high", "num_seeds"]
