"""The plugin: the file of a run, when lines are appended, and which lines a resumed run removes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from eventloop import Moment, PluginError, hookimpl
from eventloop.toolbox import RunFolder, as_option, switch_off
from eventloop_jsonl.lines import LineFile, Position, is_of_run, lines, text_lines

if TYPE_CHECKING:
    from eventloop import StateView

Result = TypeVar("Result")
_NAME = "metrics.jsonl"


class Jsonl:
    """Writes every logged number, text and table as a line of JSON.

    Args:
        path: file to append to; not set: metrics.jsonl in the folder of the run.
    """

    def __init__(self, *, path: Path | None = None) -> None:
        self.path = None if path is None else Path(path)  # in Python it may be a string
        self._file: LineFile | None = None
        self._run: str | None = None
        self._resumed_at: Position | None = None
        self._starts_over = False
        self._since = ""

    @hookimpl(rank_zero=True)
    def after_load(self, state: StateView) -> None:
        """Resolves the path early, because a task may change the working directory."""
        self._file = self._file_in(state.run_dir)
        # A process killed before its first checkpoint left lines that will be logged again.
        is_new = self._resumed_at is None and not state.clock.batch
        self._starts_over = is_new and self.path is None and self._file.path.is_file()
        # A run owns its folder, but several runs may share any other file.
        self._run = None if self.path is None else str(state.run_dir)

    @hookimpl(wrapper=True)
    def fit_start(self, state: StateView) -> Generator[None, None, None]:
        """Removes the lines after the checkpoint from which the run resumes.

        If the run starts over in its folder, renames the whole file.
        """
        yield
        # The run's lock is held by now, so no other process writes to the file.
        if self._file is not None:
            self._file.check()
        if self._file is not None and self._starts_over:
            self._starts_over = False
            self._tried(self._file.set_aside)
            self._tried(functools.partial(self._file.append, self._since))
        if self._file is not None and self._resumed_at is not None:
            position = self._resumed_at
            self._resumed_at = None
            if self._tried(functools.partial(self._file.cut_after, position, self._is_surplus)):
                self._tried(functools.partial(self._file.append, self._since))

    @hookimpl(rank_zero=True)
    def log(self, state: StateView, numbers: dict[str, float], at: Moment) -> None:
        """Appends a line for each number."""
        self._append(state, lines(numbers, at, self._run))

    @hookimpl(rank_zero=True)
    def log_text(
        self, state: StateView, texts: dict[str, str | dict[str, list[Any]]], at: Moment
    ) -> None:
        """Appends a line for each text."""
        self._append(state, text_lines(texts, at, self._run))

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
        self._resumed_at = Position(**state) if "num_lines" in state else None
        self._since = ""

    def _append(self, state: StateView, text: str) -> None:
        if self._file is None:  # the trainer failed before it was complete
            self._file = self._file_in(state.run_dir)
        if self._resumed_at is not None or self._starts_over:
            self._since += text  # logged by an evaluation before the run resumes
        self._tried(functools.partial(self._file.append, text))

    def _is_surplus(self, line: bytes) -> bool:
        return self._run is None or is_of_run(line, self._run)

    def _tried(self, use: Callable[[], Result]) -> Result:
        try:
            return use()
        except OSError as error:
            assert self._file is not None
            raise PluginError(
                f"the numbers can't be written to {self._file.path}: {error.strerror or error}",
                fix="free space or give another file with "
                + as_option("jsonl", path="FILE")
                + ", or switch the "
                "plugin off with " + switch_off("jsonl"),
            ) from error

    def _file_in(self, run_dir: Path) -> LineFile:
        if self.path is not None:  # the user's own choice, a pipe perhaps
            return LineFile(self.path.expanduser().absolute())
        run_dir = run_dir.absolute()
        return LineFile(run_dir / _NAME, RunFolder(run_dir))
