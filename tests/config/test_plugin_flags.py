"""Which plugins a person wants, and which belong to a run in progress."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from eventloop.config.plugin_flags import Choice
from eventloop.plugin.records import Found


@pytest.mark.parametrize(
    ("begun_with", "role", "stays_out"),
    [
        (None, "algorithm", False),
        ({"ema"}, "algorithm", False),
        ({"sam"}, "algorithm", True),
        (set(), "algorithm", True),
        (set(), "callback", False),
    ],
)
def test_a_run_in_progress_keeps_its_algorithms(begun_with, role, stays_out):
    """One that was installed since would change the weights; a callback changes none."""
    choice = Choice(begun_with=None if begun_with is None else frozenset(begun_with))

    reason = choice.stays_out(
        Found("EMA", role, EntryPoint("EMA", "ema:Ema", "eventloop.algorithms"), "ema", "1.0")
    )

    assert (reason is not None) == stays_out
