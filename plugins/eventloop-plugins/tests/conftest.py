"""Fixtures: this package, installed or not, and mypy with the project's settings."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import importlib_metadata
import pytest

from eventloop_testing.commands import write_distribution

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def own_package(site: Path) -> None:
    """Has `eventloop` find the commands of this package, which may only be importable here."""
    commands = [
        f"plugins-{one} = eventloop_plugins.{one}:main"
        for one in ("check", "hooks", "lock", "new", "order", "show")
    ]
    commands += [f"plugins-{one} = eventloop_plugins.lists:{one}" for one in ("enable", "disable")]
    text = "\n".join(["[eventloop.commands]", *commands])
    write_distribution(site, "eventloop-plugins", text, version="0.1.0")


@pytest.fixture(autouse=True)
def no_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Leaves out what is installed: `plugins check` imports what each package adds in a fork of its own."""
    every = importlib_metadata.distributions

    def of_the_test(**given: object) -> Iterator[importlib_metadata.Distribution]:
        for one in every(**given):
            if Path(str(one.locate_file(""))).is_relative_to(tmp_path):
                yield one

    monkeypatch.setattr(importlib_metadata, "distributions", of_the_test)


@pytest.fixture
def run_mypy() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs mypy with the project's settings."""

    def run_mypy(*paths: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        settings = ["--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".mypy_cache"]
        return subprocess.run(
            [sys.executable, "-m", "mypy", *settings, *paths],
            cwd=cwd,
            env=os.environ | {"MYPYPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            check=False,
        )

    return run_mypy
