"""The plugin: where the lines go, and when."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from eventloop import Moment, PluginError, hookimpl
from eventloop_jsonl.lines import LineFile, lines

if TYPE_CHECKING:
    from eventloop import StateView


class Jsonl:
    """Writes every logged number as one line of JSON.

    Args:
        path: the file, which is appended to; not set: metrics.jsonl in the folder of the run.
    """

    def __init__(self, *, path: Path | None = None) -> None:
        self.path = None if path is None else Path(path)  # a script may well give a text
        self._file: LineFile | None = None

    @hookimpl(rank_zero=True)
    def log(self, state: StateView, numbers: dict[str, float], at: Moment) -> None:
        """Appends a line for each number."""
        if self._file is None:
            self._file = LineFile(self._path_in(state.run_dir))
        try:
            self._file.append(lines(numbers, at))
        except OSError as error:
            raise PluginError(
                f"the numbers can't be written to {self._file.path}: {error.strerror or error}",
                fix="free space or give another file with `--jsonl.path FILE`, or switch the "
                "plugin off with `-p no:jsonl`",
            ) from error

    @hookimpl
    def close(self) -> None:
        """Closes the file, if one was opened."""
        if self._file is not None:
            self._file.close()

    def _path_in(self, run_dir: Path) -> Path:
        # Absolute, so that a task that changes the working directory splits no file in two.
        path = run_dir / "metrics.jsonl" if self.path is None else self.path.expanduser()
        return path.absolute()
