"""`fit --check`: what it prints at the end, and its exit status."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eventloop.cli import main

TASK = "from eventloop_testing import tiny_task\ntask = tiny_task()\n"
WATCH = """
from eventloop import hookimpl

class Plugin:
    @hookimpl
    def batch_end(self, state):
        {body}
"""


def install(folder: Path, name: str, group: str, target: str) -> None:
    """Writes metadata as pip leaves it: in this environment the package may be importable alone."""
    info = folder / f"eventloop_{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: eventloop-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[eventloop.{group}]\n{name} = {target}\n")


@pytest.fixture
def checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[int, str]]]:
    """Trains with `--check` and plugins of one hook; returns exit status and stdout."""
    for variable in [name for name in os.environ if name.startswith("EVENTLOOP_")]:
        monkeypatch.delenv(variable)
    install(tmp_path, "check", "options", "eventloop_check:Check")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("pyproject.toml").touch()
    Path("tiny.py").write_text(TASK)

    def checked(**bodies: str) -> tuple[int, str]:
        argv = ["fit", "tiny.py", "--no-plugins", "--check", "--max-duration=6ba", "--device=cpu"]
        for name, body in bodies.items():
            Path(f"{name}_module.py").write_text(WATCH.format(body=body))
            group = "algorithms" if name == "doubles" else "callbacks"
            install(tmp_path, name, group, f"{name}_module:Plugin")
            argv += ["-p", name]
        importlib.invalidate_caches()
        return main(argv), capsys.readouterr().out

    yield checked
    for name in [name for name in sys.modules if name.endswith("_module")]:
        if str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def test_a_failed_run_is_checked(checked):
    """What was found until then may be why it failed."""
    status, out = checked(bad="1 / 0")

    assert status == 1
    assert "check: no problem" in out


def test_writers_and_offenders_are_named(checked):
    """Exit status 1, so that a pipeline stops at a plugin that does what it must not."""
    status, out = checked(sneaky="state.batch[0].add_(1)", doubles="state.loss = state.loss * 2")

    assert status == 1
    assert ["loss", "batch_end", "doubles", "6"] in [line.split() for line in out.splitlines()]
    assert "check: 1 problem\nsneaky (eventloop-sneaky 1.0), batch_end: wrote in place" in out


def test_a_check_that_finds_nothing_says_so(checked):
    """Silence could be a switch that did nothing."""
    status, out = checked()

    assert status == 0
    assert out.endswith("check: no problem\n")
