"""Paths that no system takes: an error that says so, whichever command they are given to."""

from __future__ import annotations

import pytest

from eventloop.cli.entry import main

LONG = "a" * 5_000


@pytest.mark.parametrize(
    "argv",
    [
        ["fit", LONG],
        ["checkpoints", LONG],
        ["checkpoints", "verify", LONG],
        ["checkpoints", "diff", LONG, LONG],
        ["export", LONG, "out.safetensors"],
    ],
    ids=lambda argv: " ".join(argv)[:20],
)
def test_a_path_that_is_too_long_is_an_error(argv, clean, capsys):
    """Not a traceback of where the system was asked."""
    assert main(argv) == 2

    err = capsys.readouterr().err
    assert err.startswith("UsageError: a path is too long: ")
    assert "Traceback" not in err
    assert len(err) < 500
