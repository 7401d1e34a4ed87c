"""The plugin: measures each call, and writes file and table when the trainer is closed."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from eventloop import hookimpl
from eventloop.toolbox import RunFolder, one_line
from eventloop_trace.spans import Spans

if TYPE_CHECKING:
    from eventloop import StateView


class Trace:
    """Measures each call of every plugin, the core's and the task's too.

    Each rank writes a file, `trace.json` or `trace.rank1.json` in the run's folder; the first one
    prints the table.

    Args:
        max_spans: how many the file has; the table counts all.

    Attributes:
        spans: the spans measured so far.
        path: of the file; None before it is written.
    """

    off_until_named = True

    def __init__(self, *, max_spans: int = 1_000_000) -> None:
        if max_spans < 1:
            raise ValueError(f"Trace(max_spans={max_spans}): it is 1 or more")
        self.max_spans = max_spans
        self.spans = Spans(max_spans)
        self.path: Path | None = None
        self._folder: Path | None = None  # of a fit that has begun
        self._rank = 0

    def around_calls(
        self, plugin: str, hook: str, state: StateView
    ) -> AbstractContextManager[None]:
        """Returns a context manager that measures a call."""
        return self.spans.taken(plugin, hook, state.clock)

    @hookimpl
    def fit_start(self, state: StateView) -> None:
        """Refuses a file that can't be written, before anything is trained."""
        self._rank = state.rank
        RunFolder(state.run_dir).check(self._file)
        self._folder = state.run_dir  # from now on `close` writes

    @hookimpl
    def close(self) -> None:
        """Writes the file and prints the table, once."""
        folder = self._folder
        self._folder = None
        if folder is None:
            return
        with RunFolder(folder).replacing(self._file) as path:
            self.spans.write(path, self._rank)
        self.path = folder / self._file
        if self._rank == 0:
            sys.stdout.writelines(f"{one_line(line)}\n" for line in self._lines())
            sys.stdout.flush()

    @property
    def _file(self) -> str:
        return f"trace.rank{self._rank}.json" if self._rank else "trace.json"

    def _lines(self) -> list[str]:
        rows = [self.spans.columns, *self.spans.rows()]
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        place = f"{self.path}; open it in https://ui.perfetto.dev"
        lines.append(f"trace: {len(self.spans.first)} spans in {place}")
        if num_left_out := self.spans.num_left_out:
            lines.append(f"trace: {num_left_out} more are in the table, but not in the file")
        return lines
