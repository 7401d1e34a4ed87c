"""The plugin: when rows are written, and which of them a resumed run takes back."""

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
    """Writes every logged number into metrics.csv in the folder of the run: a column a name."""

    def __init__(self) -> None:
        self._file: WideFile | None = None
        self._resumed_at: Position | None = None
        self._starts_over = False
        self._since: list[tuple[dict[str, float], Moment]] = []

    @hookimpl(rank_zero=True)
    def after_load(self, state: StateView) -> None:
        """Settles where the file is, for a task may change the working directory."""
        self._file = _file_of(state)
        # A process that was killed before its first checkpoint left rows, and they come again.
        is_new = self._resumed_at is None and not state.clock.batch
        self._starts_over = is_new and self._file.path.is_file()

    @hookimpl(wrapper=True)
    def fit_start(self, state: StateView) -> Generator[None, None, None]:
        """Removes what the run wrote after the checkpoint that it resumes from.

        A run that starts over in its folder sets the whole file aside.
        """
        yield
        # The run's lock is taken by now: no other process is about to write.
        if (file := self._file) is not None:
            file.check()
            if self._starts_over:
                self._starts_over = False
                self._tried(file.end)  # an error if it is another program's file
                self._tried(file.set_aside)
                for numbers, at in self._since:
                    self._append(file, numbers, at)
            if (place := self._resumed_at) is not None:
                self._resumed_at = None
                for numbers, at in self._since if self._cut(file, place) else ():
                    self._append(file, numbers, at)

    @hookimpl(rank_zero=True)
    def log(self, state: StateView, numbers: dict[str, float], at: Moment) -> None:
        """Appends a row."""
        if self._file is None:  # the trainer failed before it was complete
            self._file = _file_of(state)
        if self._resumed_at is not None or self._starts_over:
            # Of an evaluation before the run goes on.
            self._since.append((dict(numbers), at))
        self._append(self._file, numbers, at)

    @hookimpl
    def close(self) -> None:
        """Closes the file, if one was opened."""
        if self._file is not None:
            self._file.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns where the file ends: what is logged later, a resumed run logs again."""
        if self._resumed_at is not None:
            return self._resumed_at._asdict()
        return {} if self._file is None else self._tried(self._file.end)._asdict()

    def load_state_dict(self, state: Mapping[str, Any], version: str) -> None:
        """Records where the file ended; it is truncated when training resumes, not on loading."""
        self._resumed_at = Position(**state) if state else None
        self._since = []

    def _cut(self, file: WideFile, place: Position) -> bool:
        return self._tried(lambda: file.cut_after(place))

    def _append(self, file: WideFile, numbers: Mapping[str, float], at: Moment) -> None:
        self._tried(lambda: file.append(numbers, at))

    def _tried(self, use: Callable[[], Result]) -> Result:
        try:
            return use()
        except (OSError, ValueError, csv.Error) as error:
            assert self._file is not None
            why = getattr(error, "strerror", None) or error
            raise PluginError(
                f"the numbers can't be written to {self._file.path}: {why}",
                fix="free space, or move away what is there, or switch the plugin off with "
                + switch_off("csv"),
            ) from error


def _file_of(state: StateView) -> WideFile:
    return WideFile(RunFolder(state.run_dir.absolute()), _NAME)
