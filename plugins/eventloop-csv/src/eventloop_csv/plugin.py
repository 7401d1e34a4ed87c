"""The plugin: when rows are written, and which rows a resumed run removes."""

from __future__ import annotations

import csv
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from eventloop import Moment, PluginError, hookimpl
from eventloop.toolbox import RunFolder, switch_off
from eventloop_csv.wide import Position, WideFile

if TYPE_CHECKING:
    from eventloop import StateView

Result = TypeVar("Result")
_NAME = "metrics.csv"


class Csv:
    """Writes every logged number into metrics.csv in the folder of the run: a column for each name."""

    def __init__(self) -> None:
        self._file: WideFile | None = None
        self._resumed_at: Position | None = None
        self._starts_over = False
        self._since: list[tuple[dict[str, float], Moment]] = []

    @hookimpl(rank_zero=True)
    def after_load(self, state: StateView) -> None:
        """Resolves the path early, because a task may change the working directory."""
        self._file = _file_of(state)
        # A process killed before its first checkpoint left rows that will be logged again.
        is_new = self._resumed_at is None and not state.clock.batch
        self._starts_over = is_new and self._file.path.is_file()

    @hookimpl(wrapper=True)
    def fit_start(self, state: StateView) -> Generator[None, None, None]:
        """Removes the rows after the checkpoint from which the run resumes.

        If the run starts over in its folder, renames the whole file.
        """
        yield
        # The run's lock is held by now, so no other process writes to the file.
        if (file := self._file) is not None:
            file.check()
            if self._starts_over:
                self._starts_over = False
                self._tried(file.end)  # an error if it is another program's file
                self._tried(file.set_aside)
                for numbers, moment in self._since:
                    self._append(file, numbers, moment)
            if (position := self._resumed_at) is not None:
                self._resumed_at = None
                if self._cut(file, position):
                    for numbers, moment in self._since:
                        self._append(file, numbers, moment)

    @hookimpl(rank_zero=True)
    def log(self, state: StateView, numbers: dict[str, float], at: Moment) -> None:
        """Appends a row."""
        if self._file is None:  # the trainer failed before it was complete
            self._file = _file_of(state)
        if self._resumed_at is not None or self._starts_over:
            # Logged by an evaluation before the run resumes.
            self._since.append((dict(numbers), at))
        self._append(self._file, numbers, at)

    @hookimpl
    def close(self) -> None:
        """Closes the file, if it was opened."""
        if self._file is not None:
            self._file.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns the end of the file: a resumed run logs everything after it again."""
        if self._resumed_at is not None:
            return self._resumed_at._asdict()
        return {} if self._file is None else self._tried(self._file.end)._asdict()

    def load_state_dict(self, state: Mapping[str, Any], version: str) -> None:
        """Records where the file ended; it is truncated when training resumes, not on loading."""
        self._resumed_at = Position(**state) if state else None
        self._since = []

    def _cut(self, file: WideFile, position: Position) -> bool:
        return self._tried(lambda: file.cut_after(position))

    def _append(self, file: WideFile, numbers: Mapping[str, float], moment: Moment) -> None:
        self._tried(lambda: file.append(numbers, moment))

    def _tried(self, use: Callable[[], Result]) -> Result:
        try:
            return use()
        except (OSError, ValueError, csv.Error) as error:
            assert self._file is not None
            reason = getattr(error, "strerror", None) or error
            raise PluginError(
                f"the numbers can't be written to {self._file.path}: {reason}",
                fix="free space, or move away what is there, or switch the plugin off with "
                + switch_off("csv"),
            ) from error


def _file_of(state: StateView) -> WideFile:
    return WideFile(RunFolder(state.run_dir.absolute()), _NAME)
