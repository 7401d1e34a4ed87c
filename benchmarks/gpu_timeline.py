"""What a device did, and when: kernels and copies, as torch.profiler saw them.

Read from the trace that it writes for Chrome, whose fields are the same in all versions of torch.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Activity:
    """One thing that a device did; operations of the host are of kind "cpu_op".

    Args:
        name: of the kernel, with its types; of a copy, which memories: `Memcpy HtoD (...)`.
        kind: kernel, gpu_memcpy, gpu_memset or cpu_op.
        stream: the number of the stream; -1 on the host.
        num_bytes: how much was copied; 0 for what copies nothing.
    """

    name: str
    kind: str
    stream: int
    start_us: float
    duration_us: float
    num_bytes: int = 0

    @property
    def end_us(self) -> float:
        """When it was done."""
        return self.start_us + self.duration_us


_KINDS = ("kernel", "gpu_memcpy", "gpu_memset", "cpu_op")


def record(run: Callable[[], object], device: torch.device) -> list[Activity]:
    """Returns what a device did while `run` ran, in order; waits for it before and after."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    synchronize(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the profiler's own cycles, in some versions
        with profile(activities=activities) as profiler:
            run()
            synchronize(device)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(path))
            trace = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    return activities_of(trace)


def activities_of(trace: Mapping[str, Any]) -> list[Activity]:
    """Reads a trace; gives kernels, copies and operations in the order in which they began."""
    found = [
        Activity(
            name=event["name"],
            kind=event["cat"],
            stream=int(event.get("args", {}).get("stream", -1)),
            start_us=float(event["ts"]),
            duration_us=float(event.get("dur", 0)),
            num_bytes=int(event.get("args", {}).get("bytes", 0)),
        )
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in _KINDS
    ]
    return sorted(found, key=lambda one: one.start_us)


def counts(activities: Iterable[Activity], kind: str) -> Counter[str]:
    """Counts the activities of a kind by name."""
    return Counter(one.name for one in activities if one.kind == kind)


def busy_us(activities: Iterable[Activity]) -> float:
    """Returns the time in which at least one of these was under way."""
    return sum(end - start for start, end in _merged(activities))


def hidden_frac(copy: Activity, kernels: Sequence[Activity]) -> float:
    """Returns the share of a copy's time in which one of the kernels was under way."""
    hidden = sum(
        max(0.0, min(end, copy.end_us) - max(start, copy.start_us))
        for start, end in _merged(kernels)
    )
    return hidden / copy.duration_us


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _merged(activities: Iterable[Activity]) -> list[tuple[float, float]]:
    spans: list[tuple[float, float]] = []
    for one in sorted(activities, key=lambda one: one.start_us):
        if spans and one.start_us <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], one.end_us))
        else:
            spans.append((one.start_us, one.end_us))
    return spans
