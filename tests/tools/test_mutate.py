"""Mistakes in the sources are found by the tests next to them."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

MUTATE = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "mutate.py"))


@pytest.mark.nightly
@pytest.mark.parametrize("name", MUTATE["MUTANTS"])
def test_a_mistake_is_detected(name):
    """What the nearest tests don't find, someone who changes that file won't either."""
    assert not MUTATE["survives"](MUTATE["MUTANTS"][name])


@pytest.mark.nightly
def test_a_mutant_without_a_mistake_survives(monkeypatch):
    """Else tests that always fail would detect everything."""
    mutant = MUTATE["MUTANTS"]["another seed may resume a run"]

    assert MUTATE["survives"](mutant._replace(new=mutant.old))


@pytest.mark.parametrize("mutant", MUTATE["MUTANTS"].values(), ids=MUTATE["MUTANTS"])
def test_a_mutant_is_of_a_line_that_is_there(mutant):
    """Sources move on, and a mutant that can't be made finds nothing."""
    root = Path(__file__).parents[2]

    assert (root / "src/eventloop" / mutant.path).read_text().count(mutant.old) == 1
    assert (root / "tests" / mutant.tests).is_file()
