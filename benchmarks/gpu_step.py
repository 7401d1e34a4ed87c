"""GPU step: what a step costs with eventloop, against the loop that an expert writes by hand.

Three networks: a small CNN whose launches take longer than its kernels, one of the shape of
ResNet-50, and GPT-2 with 124 million parameters. Both loops train them in bf16 under autocast, with
fused optimizers, convolutions in channels_last, batches copied from pinned memory on a stream of
their own, and nothing that waits for the device; eager, and compiled by torch.compile.

They are interleaved in one run: plain, eventloop, plain, and so on. A turn of eventloop's is
compared with the mean of the plain turns before and after it, and these two with each other: the
noise. What is printed are ratios; without a GPU, of tiny networks, to see that it runs.

    python benchmarks/gpu_step.py [--workload gpt2] [--mode eager] [--steps 50] [--turns 10]
                                  [--batch-size 32] [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import platform
import statistics
import sys
import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from gpu_loops import Batches, Run, eventloop_run, plain_run
from gpu_timeline import busy_us, record, synchronize
from gpu_workloads import Workload, workloads
from rich.console import Console
from rich.table import Table

MODES = ("eager", "compiled")
NUM_WARM_UP = 10
NUM_OBSERVED = 10  # steps for host time, and for GPU time
NUM_BATCHES = 8  # different ones, that are trained on again and again


@dataclass(frozen=True)
class Measured:
    """What one loop costs.

    Args:
        step_ms: median of the time a step, from the first launch until the device is done.
        host_ms: median of the time from one batch until the next is asked for, while the device
            has nothing else to do: what the host needs to launch a step.
        gpu_ms: time a step in which a kernel was under way; None without a GPU.
        peak_gib: the most memory that was allocated at once; None without a GPU.
    """

    step_ms: float
    host_ms: float
    gpu_ms: float | None
    peak_gib: float | None


@dataclass(frozen=True)
class Row:
    """One line of the table: a workload in one mode.

    Args:
        ratio: median of the time a step with eventloop over the plain loop's.
        ratio_low, ratio_high: its quartiles.
        noise_low, noise_high: quartiles of the same for the plain loop against itself.
    """

    workload: str
    mode: str
    batch_size: int
    ratio: float
    ratio_low: float
    ratio_high: float
    noise_low: float
    noise_high: float
    plain: Measured
    eventloop: Measured


@dataclass
class Loop:
    """A loop that trains, and the data loader that it takes from."""

    run: Run
    batches: Batches
    peak_gib: float | None = None


def measure(
    workload: Workload, mode: str, batch_size: int, device: torch.device, turns: int, steps: int
) -> Row:
    """Measures both loops over one workload."""
    torch.compiler.reset()
    try:
        with ExitStack() as stack:
            return _measure(stack, workload, mode, batch_size, device, turns, steps)
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def _measure(
    stack: ExitStack,
    workload: Workload,
    mode: str,
    batch_size: int,
    device: torch.device,
    turns: int,
    steps: int,
) -> Row:
    generator = torch.Generator().manual_seed(0)
    made = [workload.make_batch(batch_size, generator) for _ in range(NUM_BATCHES)]
    if device.type == "cuda":
        made = [(inputs.pin_memory(), targets.pin_memory()) for inputs, targets in made]
    loops = []
    for make in (plain_run, eventloop_run):
        batches = Batches(made, device)
        building = make(workload, batches, device, compiled=mode == "compiled")
        loops.append(_warm(stack, building, batches, device))
    plain, ours = loops

    plain_ms, our_ms = [_step_ms(plain.run, steps, device)], []
    for _ in range(turns):
        our_ms.append(_step_ms(ours.run, steps, device))
        plain_ms.append(_step_ms(plain.run, steps, device))
    around = list(itertools.pairwise(plain_ms))
    ratios = [one / ((a + b) / 2) for one, (a, b) in zip(our_ms, around, strict=True)]
    low, middle, high = _quartiles(ratios)
    noise_low, _, noise_high = _quartiles([b / a for a, b in around])
    return Row(
        workload=workload.name, mode=mode, batch_size=batch_size,
        ratio=middle, ratio_low=low, ratio_high=high, noise_low=noise_low, noise_high=noise_high,
        plain=_measured(plain, statistics.median(plain_ms), device),
        eventloop=_measured(ours, statistics.median(our_ms), device),
    )  # fmt: skip


def _warm(
    stack: ExitStack,
    building: AbstractContextManager[Run],
    batches: Batches,
    device: torch.device,
) -> Loop:
    """Builds a loop and makes its first steps; gives it with the memory that it needs."""
    if device.type != "cuda":
        run = stack.enter_context(building)
        run(NUM_WARM_UP)
        return Loop(run, batches)
    before = torch.cuda.memory_allocated(device)
    run = stack.enter_context(building)
    run(NUM_WARM_UP)
    # Searches for the fastest kernel have borrowed memory; the steps after them are what counts.
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    run(NUM_WARM_UP)
    torch.cuda.synchronize(device)
    return Loop(run, batches, (torch.cuda.max_memory_allocated(device) - before) / 2**30)


def _measured(loop: Loop, step_ms: float, device: torch.device) -> Measured:
    host_ms = loop.batches.host_ms(loop.run, NUM_OBSERVED)
    gpu_ms = None
    if device.type == "cuda":
        activities = record(lambda: loop.run(NUM_OBSERVED), device)
        kernels = [one for one in activities if one.kind == "kernel"]
        gpu_ms = busy_us(kernels) / NUM_OBSERVED / 1e3
    return Measured(step_ms, host_ms, gpu_ms, loop.peak_gib)


def _step_ms(run: Run, num_steps: int, device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    run(num_steps)
    synchronize(device)
    return (time.perf_counter() - began) / num_steps * 1e3


def _quartiles(values: list[float]) -> list[float]:
    if len(values) == 1:
        return values * 3
    return statistics.quantiles(values, n=4, method="inclusive")


def machine_of(device: torch.device) -> dict[str, Any]:
    """Names the machine and what the numbers depend on."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "CPU",
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,
        "python": platform.python_version(),
    }


def show(machine: dict[str, Any], rows: list[Row]) -> None:
    """Prints the table."""
    table = Table(title="a step, eventloop over plain")
    for column in ("", "ratio", "quartiles", "noise", "step ms", "host ms", "GPU ms", "peak GiB"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.workload} x {row.batch_size}, {row.mode}",
            f"{row.ratio:.3f}",
            f"{row.ratio_low:.3f} to {row.ratio_high:.3f}",
            f"{row.noise_low:.3f} to {row.noise_high:.3f}",
            *(_pair(row, field.name) for field in dataclasses.fields(Measured)),
        )
    console = Console(width=max(130, Console().width))
    console.print(table)
    console.print("pairs are plain, then eventloop", highlight=False)
    named = ", ".join(f"{name} {value}" for name, value in machine.items() if value is not None)
    console.print(named, highlight=False)
    if machine["device"] == "CPU":
        console.print("there is no GPU: the networks are tiny, and these numbers mean nothing")


def _pair(row: Row, name: str) -> str:
    plain, ours = getattr(row.plain, name), getattr(row.eventloop, name)
    return "" if plain is None else f"{plain:.2f}, {ours:.2f}"


def main(arguments: list[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workload", action="append", choices=workloads(), help="default: all")
    parser.add_argument("--mode", action="append", choices=MODES, help="default: both on a GPU")
    parser.add_argument("--batch-size", type=int, help="of all workloads; default: of each its own")
    parser.add_argument("--steps", type=int, default=50, help="steps a turn")
    parser.add_argument("--turns", type=int, default=10, help="turns of each loop")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True

    rows = []
    chosen = workloads(tiny=not on_gpu)
    for name in options.workload or chosen:
        for mode in options.mode or MODES[: 2 if on_gpu else 1]:
            size = options.batch_size or chosen[name].batch_size
            rows.append(measure(chosen[name], mode, size, device, options.turns, options.steps))
    machine = machine_of(device)
    if options.json:
        told = {"machine": machine, "rows": [dataclasses.asdict(row) for row in rows]}
        sys.stdout.write(json.dumps(told, indent=1) + "\n")
    else:
        show(machine, rows)


if __name__ == "__main__":
    main()
