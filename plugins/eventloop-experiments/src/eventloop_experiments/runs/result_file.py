"""`--result`: writes the metrics of a run, the time of a step, and peak memory."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eventloop import EventloopError, hookimpl
from eventloop.devices import kind_of
from eventloop.toolbox import named_metrics, replace_file

if TYPE_CHECKING:
    from eventloop import Result, StateView, Trainer

_MOST_STEPS = 10_000  # the latest; on a GPU each holds an event
_STATUS = Path("/proc/self/status")
_MOMENT = ("epoch", "batch", "sample", "token", "seconds")


class ResultFile:
    """Measures a run and writes its results.

    Args:
        path: path of the file.

    Attributes:
        cost: the callback that measures the run.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.cost = Cost()

    def write(self, trainer: Trainer, result: Result) -> None:
        """Writes metrics, time per step and memory atomically, on rank 0.

        Raises:
            EventloopError: the file can't be written.
        """
        if trainer.state.rank != 0:
            return
        content = _content(trainer, result, self.cost)
        text = json.dumps(content, indent=2, allow_nan=False)
        try:
            replace_file(self._path, f"{text}\n".encode("ascii"))
        except OSError as error:
            raise EventloopError(
                f"the result can't be written to {self._path}: {error.strerror or error}",
                fix="free space, or give another file",
            ) from error


def _content(trainer: Trainer, result: Result, cost: Cost) -> dict[str, Any]:
    """Returns the content of the file; a number that isn't finite is null."""
    state = trainer.state
    row = result.history[-1] if result.history else {}
    numbers = {name: value for name, value in row.items() if name not in _MOMENT}
    return {
        "metrics": {
            name: value if math.isfinite(value) else None for name, value in numbers.items()
        },
        "higher_is_better": {name: _is_higher_better(trainer, name) for name in numbers},
        "extremes": _extremes(result.history, numbers),
        "test_sets": sorted(state.test_sets),
        "checkpoint_best": state.settings.checkpoint_best,
        **state.clock.moment()._asdict(),
        "step_s": cost.step_s,
        "peak_memory_bytes": peak_memory_bytes(state.device),
        "stop_reason": state.stop_reason,
        "algorithms": [plugin.name for plugin in trainer.plugins if plugin.role == "algorithm"],
        "off": {plugin.name: plugin.reason for plugin in trainer.off},
    }


def _extremes(
    history: Iterable[Mapping[str, float]], names: Iterable[str]
) -> dict[str, dict[str, float]]:
    """Returns the minimum and maximum of each number over all evaluations."""
    rows = list(history)
    extremes = {}
    for name in names:
        values = [row[name] for row in rows if name in row and math.isfinite(row[name])]
        if values:
            extremes[name] = {"min": min(values), "max": max(values)}
    return extremes


def _is_higher_better(trainer: Trainer, name: str) -> bool | None:
    """Returns whether higher values are better; None if the metric doesn't define it."""
    if name == "train/loss":
        return False
    metrics = trainer.state.metrics
    directions = {name: metric.is_higher for name, metric in named_metrics(metrics).items()}
    for metric_name, metric in metrics["train"].items():
        directions[f"train/{metric_name}"] = metric.higher_is_better
    # A metric with several results logs them under dotted names, "test/f1.macro".
    return directions.get(name, directions.get(name.partition(".")[0]))


class Cost:
    """Measures the time of a step, and peak memory; a callback.

    A step lasts from a `batch_end` to the next: fetching the batch, training on it, and all plugins'
    work. Steps interrupted by an evaluation or the end of an epoch are left out. On a GPU, its own time
    is measured, and read on request.
    """

    name = "cost"

    needs_eval_data = True

    def __init__(self) -> None:
        self._mark: Callable[[], float | torch.Event | None] = time.perf_counter
        self._marks: deque[float | torch.Event | None] = deque(maxlen=_MOST_STEPS)

    @property
    def steps_s(self) -> list[float]:
        """The times of the latest steps, in seconds; waits for the device."""
        return [*_seconds(self._marks)]

    @property
    def step_s(self) -> float | None:
        """The median time of a step, in seconds; None if there was no step."""
        steps = self.steps_s
        return statistics.median(steps) if steps else None

    @hookimpl
    def fit_start(self, state: StateView) -> None:
        if (kind := kind_of(state.device)).streams is not None:
            self._mark = partial(kind.record, timed=True)

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
    """Returns peak memory so far: of the device, or for a CPU of this process."""
    if of_device := kind_of(device).memory():
        return of_device["peak"]
    # Not `getrusage`: its peak includes the memory of the parent process before `exec`.
    if _STATUS.is_file():
        words = _STATUS.read_text().partition("VmHWM:")[2].split()
        return int(words[0]) * 1024
    import resource  # not on Windows

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def _seconds(marks: Iterable[float | torch.Event | None]) -> Iterator[float]:
    """Yields the times between adjacent marks; None marks an interruption."""
    for start, end in pairwise(marks):
        if isinstance(start, float) and isinstance(end, float):
            yield end - start
        elif not isinstance(start, float | None) and not isinstance(end, float | None):
            end.synchronize()
            yield start.elapsed_time(end) / 1000
