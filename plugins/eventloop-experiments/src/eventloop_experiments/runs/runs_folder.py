"""The folder of a command's runs: their description, and the outcome of each."""

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
    """A run of `eventloop fit` among others in a folder; messages name it by its `str`."""

    @property
    def place(self) -> Path:
        """Its folder, relative to the folder of all runs: `without-ema/seed-3`."""

    @property
    def argv(self) -> Sequence[str]:
        """The arguments of `eventloop`, without `--run-dir` and `--result`."""


R = TypeVar("R", bound=Run)


@dataclass(frozen=True)
class Outcome(Generic[R]):
    """The outcome of a run.

    Args:
        content: the content of the `--result` file; None if the run failed.
        reason: why it failed.
        log: file with the run's terminal output.
        seconds: duration of the run; 0 if it was done before.
        was_killed: whether a signal ended it, so that it may resume from its checkpoint.
    """

    run: R
    content: Mapping[str, Any] | None
    reason: str
    log: Path
    seconds: float = 0.0
    was_killed: bool = False


class RunsFolder:
    """The folder of runs: a run's folder is `without-ema/seed-3`, with its log and result next to it.

    Args:
        path: created when the runs begin.
        kind: name of the runs as a whole: "ablation".
    """

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        self._kind = kind
        self._files = RunFolder(path)

    def begin(self, description: Mapping[str, Any], *, allow_code: bool = False) -> None:
        """Writes the description of the runs; compares it with the stored one if they are resumed.

        Args:
            description: the result of `describe` with additions of the command; JSON-serializable.
            allow_code: whether the task's file and versions may differ.

        Raises:
            ResumeError: the stored description differs; lists the differences.
            UsageError: the folder contains something else, or a link in the place of a file.
            EventloopError: the description can't be written.
        """
        file = self.path / f"{self._kind}.json"
        stored_description = read_json(self._files, file.name)
        if stored_description is not None:
            self._compare(stored_description, description, allow_code)
            if not allow_code:
                return
        elif self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise UsageError(
                f"--run-dir {self.path}: there is something that is not {a(self._kind)}",
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
        """Locks the folder against other processes, whose runs would conflict with these.

        Raises:
            ResumeError: another process holds the lock.
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
        """Returns the file with the result of a run, which exists once the run is done."""
        return self._sibling(run, ".json")

    def log(self, run: Run) -> Path:
        """Returns the file with a run's terminal output."""
        return self._sibling(run, ".log")

    def open_log(self, run: Run) -> int:
        """Opens the log of a run to be appended to; refuses a link in the place of the run's folder.

        Returns:
            A descriptor, which the caller closes.
        """
        self._files.names(run.place.as_posix())
        return self._files.append_to(self.log(run).relative_to(self.path).as_posix())

    def read(self, name: str) -> dict[str, Any] | None:
        """Returns the content of a file that `keep` wrote; None if there is no such file."""
        return read_json(self._files, name)

    def keep(self, name: str, content: Mapping[str, Any]) -> None:
        """Writes a file next to the runs."""
        self._files.write(name, json.dumps(content, indent=1).encode("ascii"))

    def content(self, run: Run) -> dict[str, Any] | None:
        """Returns the result of a run; None if it isn't done."""
        return read_json(self._files, self.result(run).relative_to(self.path).as_posix())

    def manifest(self, run: Run) -> dict[str, Any] | None:
        """Returns the manifest of a run; None if it has none."""
        return read_json(self._files, f"{run.place.as_posix()}/manifest.json")

    def remove(self, run: Run) -> None:
        """Removes a run's files, so that it is trained anew; its empty folder and its log stay."""
        self._files.names(run.place.as_posix())  # refuses a link
        shutil.rmtree(self.run_dir(run), ignore_errors=True)
        self.run_dir(run).mkdir(exist_ok=True)
        self.result(run).unlink(missing_ok=True)

    def outcome(self, run: R) -> Outcome[R] | None:
        """Returns the outcome of a finished run; None if it isn't finished."""
        content = self.content(run)
        return None if content is None else Outcome(run, content, "", self.log(run))

    def _sibling(self, run: Run, suffix: str) -> Path:
        path = self.run_dir(run)
        return path.with_name(path.name + suffix)  # `lr-0.5` has no suffix that could be replaced

    def _compare(
        self, stored: Mapping[str, Any], description: Mapping[str, Any], allow_code: bool
    ) -> None:
        # Through JSON, as the stored description is: tuples become lists.
        lines = [*_differences(stored, json.loads(json.dumps(description)), allow_code)]
        if lines:
            raise ResumeError(
                f"the {self._kind} in {self.path} was begun with another configuration",
                changed="\n    ".join(["", *lines]) if len(lines) > 1 else lines[0],
                fix="start it as it was begun, or begin another one with another --run-dir",
            )


def _differences(
    stored: Mapping[str, Any], current: Mapping[str, Any], allow_code: bool
) -> Iterator[str]:
    for section in current:
        old_value = stored.get(section)
        new_value = current[section]
        if section not in _OF_JOB and old_value != new_value:
            yield f"{section}: {_shown(old_value)} -> {_shown(new_value)}"
    for section in ("settings", "command"):
        yield from config_differences(stored, current, section)
    if not allow_code:
        yield from task_differences(stored["task"], current["task"])
    versions, options = plugin_differences(stored["plugins"], current["plugins"], ())
    if not allow_code:
        yield from versions.values()
    yield from options


def _shown(value: object) -> str:
    return (", ".join(map(str, value)) if isinstance(value, list) else str(value or "")) or "none"


def read_json(files: RunFolder, name: str) -> dict[str, Any] | None:
    """Returns the content of a file; None if it is missing or incomplete."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(files.read(name, _MAX_BYTES))
        return content if isinstance(content, dict) else None
    return None
