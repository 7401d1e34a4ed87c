"""Fixtures for commands."""

from __future__ import annotations

import pytest


@pytest.fixture
def followed(run, tiny):
    """A run of which the first evaluation is the best: the loss falls, and the highest is wanted."""
    ran = run("fit", "tiny.py", "--no-plugins", "--run-dir", "there", "--checkpoint-best",
              "max test/loss", "--checkpoint-keep", "1")  # fmt: skip
    assert ran.status == 0, ran.err
