"""The folder of an ablation: what it is of, and what came of its runs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eventloop.checkpoint.differences import (
    config_differences,
    plugin_differences,
    task_differences,
)
from eventloop.checkpoint.run_lock import RunLock
from eventloop.cli.ablate.runs import Outcome, Run
from eventloop.errors import EventloopError, ResumeError, UsageError

FILE = "ablation.json"


class Folder:
    """Where the runs are: `without-ema/seed-3` is the folder of a run; log and result lie beside it.

    Args:
        path: made when the ablation begins.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, description: Mapping[str, Any]) -> None:
        """Writes what the ablation is of, or compares, where it goes on.

        Raises:
            ResumeError: it was begun as another one; with what differs.
            UsageError: something else is in the folder.
            EventloopError: it can't be written.
        """
        file = self.path / FILE
        then = read_json(file)
        if then is not None:
            self._compare(then, description)
            return
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise UsageError(
                f"--run-dir {self.path}: there is something that is no ablation",
                fix="name a new folder, or leave --run-dir out",
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            new = file.with_name(f".{FILE}.new")
            new.write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
            new.replace(file)
        except OSError as error:
            raise EventloopError(
                f"{file} can't be written: {error.strerror or error}",
                fix="free space, or give another folder with --run-dir",
            ) from error

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keeps other ablations out, whose runs would be in the way of each other.

        Raises:
            ResumeError: one is under way here.
        """
        lock = RunLock(self.path)
        lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def run_dir(self, run: Run) -> Path:
        """Gives the folder of a run."""
        return self.path / run.place

    def result(self, run: Run) -> Path:
        """Gives the file with the result of a run, which is there when the run is done."""
        return self.run_dir(run).with_suffix(".json")

    def log(self, run: Run) -> Path:
        """Gives the file with what a run writes to the terminal."""
        return self.run_dir(run).with_suffix(".log")

    def outcome(self, run: Run) -> Outcome | None:
        """Gives what came of a run that is done; None where it isn't."""
        content = read_json(self.result(run))
        return None if content is None else Outcome(run, content, "", self.log(run))

    def _compare(self, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        lines = [*_differences(then, json.loads(json.dumps(now)))]
        if lines:
            raise ResumeError(
                f"the ablation in {self.path} was begun with another configuration",
                changed="\n    ".join(["", *lines]) if len(lines) > 1 else lines[0],
                fix="start it as it was begun, or begin another one with another --run-dir",
            )


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for section in ("algorithms", "keep"):
        before, after = (", ".join(one[section]) or "none" for one in (then, now))
        if before != after:
            yield f"{section}: {before} -> {after}"
    for section in ("settings", "command"):
        yield from config_differences(then, now, section)
    yield from task_differences(then["task"], now["task"])
    versions, options = plugin_differences(then["plugins"], now["plugins"], ())
    yield from (*versions, *options)


def read_json(path: Path) -> dict[str, Any] | None:
    """Gives the content of a file; None where it isn't there, or isn't whole."""
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else None
    return None
