"""Fixtures for commands."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import importlib_metadata
import pytest

from eventloop.files import disk


@pytest.fixture
def followed(run, tiny):
    """A run of which the first evaluation is the best: the loss falls, and the highest is wanted."""
    ran = run("fit", "tiny.py", "--no-plugins", "--run-dir", "there", "--checkpoint-best",
              "max test/loss", "--checkpoint-keep", "1")  # fmt: skip
    assert ran.status == 0, ran.err


@pytest.fixture
def saved(run, tiny):
    """A run with two checkpoints, in a folder with a space in its name."""
    ran = run("fit", "tiny.py", "--no-plugins", "--run-dir", "runs/a run")
    assert ran.status == 0, ran.err
    return tiny


@pytest.fixture
def removing(monkeypatch):
    """Removes a checkpoint, as a run under way does, when the first of its files is opened."""

    def removing(path, num_openings=1):
        opened, init = [], disk.OldFile.__init__

        def watched(file, at):
            opened.append(path == at.parent)
            if sum(opened) == num_openings:
                shutil.rmtree(path, ignore_errors=True)
            init(file, at)

        monkeypatch.setattr(disk.OldFile, "__init__", watched)

    return removing


@pytest.fixture
def no_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Leaves out what is installed: `plugins check` imports what each package adds in a fork of its own."""
    every = importlib_metadata.distributions

    def of_the_test(**given: object) -> Iterator[importlib_metadata.Distribution]:
        for distribution in every(**given):
            if Path(str(distribution.locate_file(""))).is_relative_to(tmp_path):
                yield distribution

    monkeypatch.setattr(importlib_metadata, "distributions", of_the_test)
