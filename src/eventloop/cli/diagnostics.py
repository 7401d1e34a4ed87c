"""What `fit --trace`, `--check` and `--profile` look at, and what they write at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from eventloop.cli.output import write_lines, write_table, write_text
from eventloop.diagnostics.check import Check
from eventloop.diagnostics.profile import Profile
from eventloop.diagnostics.trace import Trace
from eventloop.plugin.records import FlagPlugin

if TYPE_CHECKING:
    from eventloop.plugin.observe import Observer


class Diagnostics:
    """The observers of a run; they report when it ends, however it ends.

    Args:
        trace_file: where the spans go; None for no trace.
        check: whether to check.
        profile: whether to record operations.
    """

    def __init__(self, trace_file: Path | None, check: bool, profile: bool = False) -> None:
        if trace_file is not None and (rank := os.environ.get("RANK", "0")) != "0":
            trace_file = trace_file.with_suffix(f".rank{rank}{trace_file.suffix}")
        self._trace_file = trace_file
        self._trace = Trace() if trace_file is not None else None
        self._check = Check() if check else None
        self._profile = Profile() if profile else None

    @property
    def observers(self) -> list[Observer]:
        """What the trainer puts around the hooks."""
        return [one for one in (self._check, self._trace) if one is not None]

    @property
    def callbacks(self) -> list[object]:
        """The plugins that watch the run."""
        return [FlagPlugin(self._profile, "--profile")] if self._profile is not None else []

    @property
    def status(self) -> int:
        """The exit status: 1 where the check found something, else 0."""
        return int(self._check is not None and bool(self._check.findings))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._trace is not None and self._trace_file is not None:
            write_table(Trace.columns, self._trace.rows())
            self._trace.write(self._trace_file)
            write_lines(_written(self._trace, self._trace_file))
        if self._profile is not None:
            write_text(self._profile.table())
            if self._profile.path is not None:
                write_lines([f"profile: {self._profile.path}; open it in https://ui.perfetto.dev"])
        if self._check is not None:
            rows = list(self._check.rows())
            if rows:
                write_table(Check.columns, rows)
            write_lines(_checked(self._check))


def _checked(check: Check) -> Iterator[str]:
    yield f"check: {_problems(len(check.findings))}"
    for finding in check.findings:
        yield from str(finding).splitlines()


def _problems(number: int) -> str:
    return "no problem" if number == 0 else f"{number} problem{'s' * (number > 1)}"


def _written(trace: Trace, path: Path) -> list[str]:
    lines = [f"trace: {len(trace.spans)} spans in {path}; open it in https://ui.perfetto.dev"]
    if trace.num_left_out:
        lines.append(f"trace: {trace.num_left_out} more are in the table, but not in the file")
    return lines
