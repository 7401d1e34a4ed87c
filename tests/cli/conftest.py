"""Fixtures for commands."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
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


_WRAPS = '''
from eventloop import hookimpl

class Plugin:
    """Does a thing.

    Args:
        alpha: how much of it.
    """

    def __init__(self, *, alpha: float = 0.4, beta: int = 1): pass

    @hookimpl(wrapper=True)
    def loss(self, state):
        return (yield)

    @hookimpl(tryfirst=True)
    def batch_end(self, state): pass
'''
_FOLLOWS = """
from eventloop import hookimpl

class Plugin:
    @hookimpl(after="aa-test")
    def batch_end(self, state): pass

    @hookimpl
    def loss(self, state): return 1
"""
_DECLARES = '''
from eventloop import hookimpl, hookspec

class Hooks:
    @hookspec(per="any", collection=True)
    def aa_terms(self, state):
        """Returns a term.

        Called: once a batch.
        """

    @hookspec(per="any", firstresult=True)
    def aa_weight(self, state):
        "Returns the weight of all terms."

class Plugin:
    hookspecs = Hooks
'''
_IMPLEMENTS = """
from eventloop import hookimpl

class Plugin:
    @hookimpl
    def aa_terms(self, state): ...
"""


@pytest.fixture
def sources_of_two() -> dict[str, str]:
    """The sources of two plugins that meet in two hooks, by name."""
    return {"aa-test": _WRAPS, "bb-test": _FOLLOWS}


@pytest.fixture
def two(install: Callable[..., object], clean: Path, sources_of_two: dict[str, str]) -> Path:
    """Installs two plugins that meet in two hooks; returns the working directory."""
    for name, source in sources_of_two.items():
        install(name, source)
    return clean


@pytest.fixture
def sources_of_hooks() -> dict[str, str]:
    """The sources of a plugin that declares hooks, and of one that implements one of them, by name."""
    return {"aa-test": _DECLARES, "bb-test": _IMPLEMENTS}


@pytest.fixture
def extended(install: Callable[..., object], clean: Path, sources_of_hooks: dict[str, str]) -> Path:
    """Installs a plugin that declares hooks, and one that implements one; returns the directory."""
    for name, source in sources_of_hooks.items():
        install(name, source)
    return clean
