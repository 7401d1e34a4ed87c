"""What a step costs: its time, and the memory of the run."""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from eventloop.hooks import hookimpl

if TYPE_CHECKING:
    from eventloop.view import StateView

_MOST_STEPS = 10_000  # the latest; an event of a GPU is kept for each
_STATUS = Path("/proc/self/status")


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
        if state.device.type == "cuda":
            self._mark = _cuda_mark

    @hookimpl
    def epoch_start(self, state: StateView) -> None:
        self._marks.append(None)

    @hookimpl
    def eval_after_all(self, state: StateView) -> None:
        self._marks.append(None)

    @hookimpl(trylast=True)
    def batch_end(self, state: StateView) -> None:
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
