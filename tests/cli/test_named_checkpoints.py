"""Checkpoints that a command line names: the best of a run, and none."""

from __future__ import annotations

import json


def test_the_best_checkpoint_of_a_run_is_evaluated_where_that_is_asked_for(run, followed):
    """Not the newest, which the folder of a run stands for."""
    argv = ("eval", "tiny.py", "--no-plugins", "--json", "--weights")

    newest, best, first = (
        json.loads(run(*argv, *rest).out)
        for rest in (("there",), ("there", "--best"), ("there/checkpoints/ba00000003",))
    )

    assert best == first
    assert best["test"]["loss"] > newest["test"]["loss"]


def test_where_no_best_is_known_that_is_told(run, tiny):
    """The newest in its place would be a wrong number."""
    assert run("fit", "tiny.py", "--no-plugins", "--run-dir", "other").status == 0

    ran = run("eval", "tiny.py", "--no-plugins", "--best", "--weights", "other")

    assert ran.status == 2
    assert "'other' has no checkpoint of the best" in ran.err
