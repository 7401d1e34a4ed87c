"""The folder of a command's runs: what they are of, and what came of each."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from eventloop import EventloopError, ResumeError
from eventloop.commands import (
    RunLock,
    UsageError,
    a,
    config_differences,
    plugin_differences,
    task_differences,
)
from eventloop.toolbox import RunFolder

_MAX_BYTES = 32 * 2**20
_OF_JOB = ("task", "settings", "command", "plugins")


class Run(Protocol):
    """A run of `eventloop fit`, one of several in a folder; `str` is what messages call it."""

    @property
    def place(self) -> Path:
        """Its folder in that of all: `without-ema/seed-3`."""

    @property
    def argv(self) -> Sequence[str]:
        """What follows `eventloop`, without `--run-dir` and `--result`."""


R = TypeVar("R", bound=Run)


@dataclass(frozen=True)
class Outcome(Generic[R]):
    """What came of a run.

    Args:
        content: what `fit --result` wrote; None where it failed.
        reason: why it failed.
        log: what it wrote to the terminal, as a file.
        seconds: how long it took this time; 0 where it was done before.
        was_killed: whether a signal ended it, so that it may go on from its checkpoint.
    """

    run: R
    content: Mapping[str, Any] | None
    reason: str
    log: Path
    seconds: float = 0.0
    was_killed: bool = False


class RunsFolder:
    """The folder of runs: `without-ema/seed-3` is that of one, with its log and result next to it.

    Args:
        path: made when the runs begin.
        what: what the runs are together: "ablation".
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        self._what = what
        self._files = RunFolder(path)

    def begin(self, description: Mapping[str, Any], *, allow_code: bool = False) -> None:
        """Writes the description of the runs; compares it with the stored one if they are resumed.

        Args:
            description: what `describe` returned, and what the command adds to it; as JSON can
                hold it.
            allow_code: whether the task's file and versions may differ.

        Raises:
            ResumeError: they were begun as others; with what differs.
            UsageError: something else is in the folder, or a link in the place of a file.
            EventloopError: it can't be written.
        """
        file = self.path / f"{self._what}.json"
        then = read_json(self._files, file.name)
        if then is not None:
            self._compare(then, description, allow_code)
            if not allow_code:
                return
        elif self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise UsageError(
                f"--run-dir {self.path}: there is something that is not {a(self._what)}",
                fix="name a new folder, or leave --run-dir out",
            )
        try:
            text = json.dumps(description, indent=2)
            self._files.write(file.name, f"{text}\n".encode("ascii"))
        except OSError as error:
            raise EventloopError(
                f"{file} can't be written: {error.strerror or error}",
                fix="free space, or give another folder with --run-dir",
            ) from error

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keeps other processes out, whose runs would be in the way of these.

        Raises:
            ResumeError: one is at work here.
        """
        lock = RunLock(self.path)
        lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def run_dir(self, run: Run) -> Path:
        """Returns the folder of a run."""
        return self.path / run.place

    def result(self, run: Run) -> Path:
        """Returns the file with the result of a run, which is there when the run is done."""
        return self._sibling(run, ".json")

    def log(self, run: Run) -> Path:
        """Returns the file with what a run writes to the terminal."""
        return self._sibling(run, ".log")

    def open_log(self, run: Run) -> int:
        """Opens the log of a run to be appended to; refuses a link in the place of the run's folder.

        Returns:
            A descriptor, which the caller closes.
        """
        self._files.names(run.place.as_posix())
        return self._files.append_to(self.log(run).relative_to(self.path).as_posix())

    def read(self, name: str) -> dict[str, Any] | None:
        """Returns the content of a file that `keep` wrote; None where there is none."""
        return read_json(self._files, name)

    def keep(self, name: str, content: Mapping[str, Any]) -> None:
        """Writes a file next to the runs."""
        self._files.write(name, json.dumps(content, indent=1).encode("ascii"))

    def content(self, run: Run) -> dict[str, Any] | None:
        """Returns the result of a run; None where it isn't done."""
        return read_json(self._files, self.result(run).relative_to(self.path).as_posix())

    def manifest(self, run: Run) -> dict[str, Any] | None:
        """Returns the manifest of a run; None where it has none."""
        return read_json(self._files, f"{run.place.as_posix()}/manifest.json")

    def remove(self, run: Run) -> None:
        """Removes what a run has left, so that it is trained anew; its folder and its log stay."""
        self._files.names(run.place.as_posix())  # refuses a link
        shutil.rmtree(self.run_dir(run), ignore_errors=True)
        self.run_dir(run).mkdir(exist_ok=True)
        self.result(run).unlink(missing_ok=True)

    def outcome(self, run: R) -> Outcome[R] | None:
        """Returns what came of a run that is done; None where it isn't."""
        content = self.content(run)
        return None if content is None else Outcome(run, content, "", self.log(run))

    def _sibling(self, run: Run, suffix: str) -> Path:
        path = self.run_dir(run)
        return path.with_name(path.name + suffix)  # `lr-0.5` has no suffix that could be replaced

    def _compare(self, then: Mapping[str, Any], now: Mapping[str, Any], allow_code: bool) -> None:
        lines = [*_differences(then, json.loads(json.dumps(now)), allow_code)]
        if lines:
            raise ResumeError(
                f"the {self._what} in {self.path} was begun with another configuration",
                changed="\n    ".join(["", *lines]) if len(lines) > 1 else lines[0],
                fix="start it as it was begun, or begin another one with another --run-dir",
            )


def _differences(
    then: Mapping[str, Any], now: Mapping[str, Any], allow_code: bool
) -> Iterator[str]:
    for section in now:
        before = then.get(section)
        after = now[section]
        if section not in _OF_JOB and before != after:
            yield f"{section}: {_shown(before)} -> {_shown(after)}"
    for section in ("settings", "command"):
        yield from config_differences(then, now, section)
    if not allow_code:
        yield from task_differences(then["task"], now["task"])
    versions, options = plugin_differences(then["plugins"], now["plugins"], ())
    yield from (*(() if allow_code else versions.values()), *options)


def _shown(value: object) -> str:
    return (", ".join(map(str, value)) if isinstance(value, list) else str(value or "")) or "none"


def read_json(files: RunFolder, name: str) -> dict[str, Any] | None:
    """Returns the content of a file; None where it isn't there, or isn't whole."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(files.read(name, _MAX_BYTES))
        return content if isinstance(content, dict) else None
    return None
