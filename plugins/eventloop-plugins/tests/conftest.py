"""Fixtures: a task that trains in a blink, installed plugins, and the command run in process."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from eventloop.cli import main

ROOT = Path(__file__).parents[3]
HEARS = "from eventloop import hookimpl\nclass Plugin:\n    @hookimpl\n    def close(self): pass\n"


class Ran(NamedTuple):
    """What a command left behind."""

    status: int
    out: str
    err: str


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages with this one, which may be importable alone in this environment."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    info = site / "eventloop_plugins-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: eventloop-plugins\nVersion: 0.1.0\n"
    )
    commands = (f"plugins-{one} = eventloop_plugins.{one}:main"
                for one in ("check", "hooks", "lock", "new", "order", "show"))  # fmt: skip
    switches = (f"plugins-{one} = eventloop_plugins.lists:{one}" for one in ("enable", "disable"))
    (info / "entry_points.txt").write_text(
        "\n".join(["[eventloop.commands]", *commands, *switches])
    )
    (info / "REQUESTED").touch()
    return site


@pytest.fixture
def clean(tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory, without EVENTLOOP_ variables; modules are as they were after it."""
    modules = set(sys.modules)
    for variable in [name for name in os.environ if name.startswith("EVENTLOOP_")]:
        monkeypatch.delenv(variable)
    work = tmp_path / "work"
    work.mkdir()
    (work / "pyproject.toml").touch()  # the search for one upwards ends here
    monkeypatch.chdir(work)
    yield work
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def install(clean: Path, site: Path) -> Callable[..., None]:
    """Installs a plugin as pip leaves it: metadata and one module."""

    def install(
        name: str,
        code: str = HEARS,
        *,
        target: str = ":Plugin",
        group: str = "eventloop.algorithms",
        distribution: str = "",
        version: str = "1.0",
    ) -> None:
        distribution = distribution or f"eventloop-{name}"
        folded = distribution.replace("-", "_")
        (site / f"{folded}_module.py").write_text(code)
        info = site / f"{folded}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {folded}_module{target}\n")
        (info / "REQUESTED").touch()
        importlib.invalidate_caches()

    return install


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs `eventloop ...` in process."""

    def run(*argv: str) -> Ran:
        capsys.readouterr()
        status = main(argv)
        return Ran(status, *capsys.readouterr())

    return run


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Flags for aa-test and bb-test alone; the plugins of the environment are left out."""
    monkeypatch.setenv("EVENTLOOP_DISABLE_PLUGIN_AUTOLOAD", "1")
    return ("-p", "aa-test", "-p", "bb-test")


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
