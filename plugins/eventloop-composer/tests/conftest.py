"""Fixtures of these tests; `composer_cases` stands beside them, importable by its name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from eventloop_composer.importing import import_composer

import_composer()
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def composer_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leaves the process as Composer found it: its seeding, its threads, its folder of runs."""
    monkeypatch.delenv("COMPOSER_RUN_NAME", raising=False)
    monkeypatch.delenv("RUN_NAME", raising=False)
    kept = torch.get_rng_state()
    yield
    torch.set_rng_state(kept)
