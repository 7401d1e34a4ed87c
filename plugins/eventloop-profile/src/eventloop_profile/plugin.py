"""The plugin: which batches are recorded, and where the trace and the table go."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

from eventloop import hookimpl
from eventloop.devices import kind_of
from eventloop.toolbox import RunFolder, one_line

if TYPE_CHECKING:
    from eventloop import StateView

FILE = "profile.json"


class Profile:
    """Records a few batches with `torch.profiler`, and prints the operations that took longest.

    The trace is `profile.json` in the run's folder, for Perfetto. A step of the profiler goes from
    one `batch_end` to the next, so that evaluation in between belongs to the batch after it. The
    table is printed when the trainer is closed.

    Args:
        wait: batches that are left out first: compilation, warm caches.
        warmup: batches that are recorded and thrown away, for the profiler's own start.
        active: batches that are recorded.

    Raises:
        ValueError: nothing would be recorded.
    """

    off_until_named = True

    def __init__(self, *, wait: int = 5, warmup: int = 3, active: int = 10) -> None:
        if wait < 0 or warmup < 1 or active < 1:
            raise ValueError(
                f"Profile(wait={wait}, warmup={warmup}, active={active}): wait is 0 or more, "
                "warmup and active are 1 or more"
            )
        self.wait = wait
        self.warmup = warmup
        self.active = active
        self.path: Path | None = None
        self._profiler: profile | None = None
        self._averages: Any = None
        self._folder: Path | None = None  # of a fit that has begun, on rank 0
        self._sort_by = "self_cpu_time_total"

    @hookimpl(rank_zero=True)
    def fit_start(self, state: StateView) -> None:
        """Starts the profiler, with the first fit."""
        if self._averages is not None:
            return
        activities = {ProfilerActivity.CPU}
        if not kind_of(state.device).is_host:
            activities |= supported_activities()  # type: ignore[no-untyped-call]
            self._sort_by = "self_device_time_total"
        self._folder = state.run_dir
        RunFolder(self._folder).check(FILE)
        self._profiler = profile(
            activities=activities,
            schedule=schedule(wait=self.wait, warmup=self.warmup, active=self.active, repeat=1),
            on_trace_ready=self._keep,
        )
        self._profiler.start()

    @hookimpl(rank_zero=True)
    def batch_end(self, state: StateView) -> None:
        """Moves the profiler on by one batch; the batch after the last recorded one stops it."""
        if self._profiler is not None:
            self._profiler.step()
            if self._averages is not None:
                self._stop()

    @hookimpl(rank_zero=True)
    def fit_end(self, state: StateView) -> None:
        """Stops the profiler, where the run was shorter than the schedule."""
        self._stop()

    @hookimpl
    def exception(self, state: StateView, error: BaseException) -> None:
        """Stops the profiler, so that what was recorded until then is kept."""
        self._stop()

    @hookimpl
    def close(self) -> None:
        """Stops the profiler, if anything left it running, and prints the table, once."""
        self._stop()
        folder = self._folder
        self._folder = None
        if folder is None:
            return
        lines = self.table().split("\n")
        if self.path is not None:
            lines.append(f"profile: {self.path}; open it in https://ui.perfetto.dev")
        sys.stdout.writelines(f"{one_line(line)}\n" for line in lines)
        sys.stdout.flush()

    def table(self, num_rows: int = 15) -> str:
        """Returns a table of the slowest operations by self time; a note if none were recorded."""
        if self._averages is None:
            skipped = self.wait + self.warmup
            return f"profile: nothing was recorded; the first {skipped} batches are left out"
        return str(
            self._averages.table(
                sort_by=self._sort_by, row_limit=num_rows, max_name_column_width=50
            )
        ).strip()

    def _keep(self, profiler: profile) -> None:
        assert self._folder is not None
        with RunFolder(self._folder).replacing(FILE) as path:
            profiler.export_chrome_trace(str(path))
        self.path = self._folder / FILE
        self._averages = profiler.key_averages()

    def _stop(self) -> None:
        profiler = self._profiler
        self._profiler = None
        if profiler is not None:
            profiler.stop()
