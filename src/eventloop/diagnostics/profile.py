"""What a step costs: its operations, its time, and the memory of the run."""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from eventloop.files.run_folder import RunFolder
from eventloop.hooks import hookimpl

if TYPE_CHECKING:
    from eventloop.view import StateView

FILE = "profile.json"
_MOST_STEPS = 10_000  # the latest; an event of a GPU is kept for each
_STATUS = Path("/proc/self/status")


class Profile:
    """Records a few batches with `torch.profiler`; a callback.

    The trace is `profile.json` in the run's folder, for Perfetto. A step of the profiler goes from
    one `batch_end` to the next, so that evaluation in between belongs to the batch after it.

    Args:
        wait: batches that are left out first: compilation, warm caches.
        warmup: batches that are recorded and thrown away, for the profiler's own start.
        active: batches that are recorded.

    Raises:
        ValueError: nothing would be recorded.
    """

    name = "profile"

    def __init__(self, *, wait: int = 5, warmup: int = 3, active: int = 10) -> None:
        if wait < 0 or warmup < 1 or active < 1:
            raise ValueError(
                f"Profile(wait={wait}, warmup={warmup}, active={active}): wait is 0 or more, "
                "warmup and active are 1 or more"
            )
        self.wait, self.warmup, self.active = wait, warmup, active
        self.path: Path | None = None
        self._profiler: profile | None = None
        self._averages: Any = None
        self._folder = Path()
        self._sort_by = "self_cpu_time_total"

    @hookimpl(rank_zero=True)
    def fit_start(self, state: StateView) -> None:
        """Starts the profiler, with the first fit."""
        if self._averages is not None:
            return
        activities = [ProfilerActivity.CPU]
        if state.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            self._sort_by = "self_cuda_time_total"
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
        """Stops the profiler, if anything left it running."""
        self._stop()

    def table(self, num_rows: int = 15) -> str:
        """Returns the operations that took longest by themselves; says so where there are none."""
        if self._averages is None:
            skipped = self.wait + self.warmup
            return f"profile: nothing was recorded; the first {skipped} batches are left out"
        return str(
            self._averages.table(
                sort_by=self._sort_by, row_limit=num_rows, max_name_column_width=50
            )
        ).strip()

    def _keep(self, profiler: profile) -> None:
        with RunFolder(self._folder).replacing(FILE) as path:
            profiler.export_chrome_trace(str(path))
        self.path = self._folder / FILE
        self._averages = profiler.key_averages()

    def _stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()


class Cost:
    """Measures the time of a step, and the most memory; a callback.

    A step goes from one `batch_end` to the next: taking the batch, training on it, what all plugins
    do. Steps with an evaluation or the end of an epoch in between are left out. On a GPU it is the
    GPU's time, read on request.
    """

    name = "cost"

    needs_eval_data = True

    def __init__(self) -> None:
        self._mark: Callable[[], float | torch.cuda.Event] = time.perf_counter
        self._marks: deque[float | torch.cuda.Event | None] = deque(maxlen=_MOST_STEPS)

    @property
    def steps_s(self) -> list[float]:
        """The times of the latest steps, in seconds; waits for the device."""
        return [*_seconds(self._marks)]

    @property
    def step_s(self) -> float | None:
        """The median time of a step, in seconds; None where there was none."""
        steps = self.steps_s
        return statistics.median(steps) if steps else None

    @hookimpl
    def fit_start(self, state: StateView) -> None:
        """Finds out whose time it is."""
        if state.device.type == "cuda":
            self._mark = _cuda_mark

    @hookimpl
    def epoch_start(self, state: StateView) -> None:
        """Leaves out what was between two epochs."""
        self._marks.append(None)

    @hookimpl
    def eval_after_all(self, state: StateView) -> None:
        """Leaves out an evaluation."""
        self._marks.append(None)

    @hookimpl(trylast=True)
    def batch_end(self, state: StateView) -> None:
        """Notes the time; doesn't wait for the device."""
        self._marks.append(self._mark())


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the most memory at any time so far: of the device, or on a CPU of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # `getrusage` counts what the process that started this one had, until it became this one.
    if _STATUS.is_file():
        words = _STATUS.read_text().partition("VmHWM:")[2].split()
        return int(words[0]) * 1024
    import resource  # not on Windows

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def _cuda_mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _seconds(marks: Iterable[float | torch.cuda.Event | None]) -> Iterator[float]:
    """Yields the times between neighbours, as far as both are there."""
    for one, other in pairwise(marks):
        if isinstance(one, float) and isinstance(other, float):
            yield other - one
        elif isinstance(one, torch.cuda.Event) and isinstance(other, torch.cuda.Event):
            other.synchronize()
            yield one.elapsed_time(other) / 1000
