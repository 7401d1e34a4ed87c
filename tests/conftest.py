"""Fixtures for all tests."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Install = Callable[..., None]


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty working directory, no EVENTLOOP_ variables, and `sys` as it was afterwards."""
    modules = dict(sys.modules)
    for variable in [name for name in os.environ if name.startswith("EVENTLOOP_")]:
        monkeypatch.delenv(variable)
    work = tmp_path / "work"
    work.mkdir()
    (work / "pyproject.toml").touch()  # the search for one upwards ends here
    monkeypatch.chdir(work)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield work
    for name in sys.modules.keys() - modules.keys():
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def install(clean: Path, tmp_path: Path) -> Install:
    """Installs a plugin as pip leaves it: metadata and one module, on `sys.path`."""
    site = tmp_path / "site"
    site.mkdir()
    sys.path.insert(0, str(site))

    def install(
        name: str,
        code: str = "class Plugin: pass",
        *,
        target: str = ":Plugin",
        group: str = "eventloop.algorithms",
        distribution: str = "",
        version: str = "1.0",
    ) -> None:
        distribution = distribution or f"eventloop-{name}"
        module = f"{distribution.replace('-', '_')}_module"
        (site / f"{module}.py").write_text(code)
        info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}{target}\n")
        importlib.invalidate_caches()

    return install
