"""GPU gates: numbers that eventloop has to reach on a GPU, each with its bar.

Three networks (gpu_workloads.py), in bf16 under autocast, with fused optimizers, trained on ready batches in
pinned memory. Whatever is compared takes turns in one run, and a row is the median of the turns' ratios
with their quartiles; `noise` rows compare a loop with itself. Without a GPU the networks are tiny
and the numbers mean nothing.

    python benchmarks/gpu_gates.py                        # all: some ten minutes
    python benchmarks/gpu_gates.py eager jitter --json gates.json
    python benchmarks/gpu_gates.py --list
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_loops import Batches, Run, eventloop_run, plain_run
from gpu_rivals import RIVALS, Source, Train, by_eventloop, quiet
from gpu_step import NUM_BATCHES, machine_of
from gpu_timeline import busy_us, counts, record, synchronize
from gpu_workloads import Batch, Workload, workloads
from rich.console import Console
from rich.table import Table

from eventloop import State, hookimpl
from eventloop_ema import Ema
from eventloop_jsonl import Jsonl

SLOW_STEP_MS = 20.0  # of a network whose turns have fewer steps
NUM_PROFILED = 10


@dataclass(frozen=True)
class Row:
    """One number, and the bar that it is held to.

    Args:
        low, high: quartiles, where turns were compared.
        most, least: the bar; none for a number that is told beside others.
    """

    gate: str
    what: str
    value: float
    low: float | None = None
    high: float | None = None
    most: float | None = None
    least: float | None = None

    @property
    def holds(self) -> bool | None:
        """Whether the number reaches its bar; None without one."""
        if self.most is None and self.least is None:
            return None
        reaches = self.most is None or self.value <= self.most
        return reaches and (self.least is None or self.value >= self.least)


@dataclass(frozen=True)
class Bench:
    """Where is measured, and for how long.

    Args:
        turns: of each loop that is compared, at most.
        steps: of a turn, at most.
        names: of the networks that are trained, where not all are.
    """

    device: torch.device
    turns: int
    steps: int
    folder: Path
    names: Sequence[str] = ()
    _made: dict[str, list[Batch]] = dataclasses.field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        """Whether the numbers mean anything."""
        return self.device.type == "cuda"

    def workloads(self) -> dict[str, Workload]:
        """Returns the networks by name."""
        found = workloads(tiny=not self.on_gpu)
        return {name: one for name, one in found.items() if name in (self.names or found)}

    def made(self, workload: Workload) -> list[Batch]:
        """Returns batches on the host, in pinned memory; those of the last network that it was asked for."""
        if workload.name not in self._made:
            self._made.clear()
            generator = torch.Generator().manual_seed(0)
            made = [workload.make_batch(workload.batch_size, generator) for _ in range(NUM_BATCHES)]
            if self.on_gpu:
                made = [(one.pin_memory(), other.pin_memory()) for one, other in made]
            self._made[workload.name] = made
        return self._made[workload.name]

    def loops(
        self, stack: ExitStack, workload: Workload, given: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Loop]:
        """Builds loops by name, and makes their first steps.

        Args:
            given: what eventloop is told; "plain": True for the loop by hand, "batches" for another data loader.
        """
        made, loops = self.made(workload), {}
        for name, options in given.items():
            own: dict[str, Any] = {"compiled": False, **options}
            batches = Batches(own.pop("batches", made), self.device)
            make: Any = plain_run if own.pop("plain", False) else eventloop_run
            before = torch.cuda.memory_allocated() if self.on_gpu else 0
            run = stack.enter_context(make(workload, batches, self.device, **own))
            loops[name] = Loop(run, batches)
            run(NUM_BATCHES)
            if self.on_gpu:  # searches for the fastest kernel have borrowed memory until now
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            run(NUM_BATCHES)
            if self.on_gpu:
                torch.cuda.synchronize()
                peak = torch.cuda.max_memory_allocated() - before
                loops[name] = Loop(run, batches, peak / 2**30)
        return loops

    def by_turns(
        self, loops: Mapping[str, Loop], slow: tuple[int, int] = (20, 4)
    ) -> dict[str, list[float]]:
        """Returns the milliseconds a step of each turn, by loop.

        Args:
            slow: steps and turns of a network whose step takes long.
        """
        times: dict[str, list[float]] = {name: [] for name in loops}
        warm = {name: self.step_ms(loop, min(self.steps, 10)) for name, loop in loops.items()}
        if min(warm.values()) > SLOW_STEP_MS:
            num_steps, turns = min(slow[0], self.steps), min(slow[1], self.turns)
        else:
            num_steps, turns = self.steps, self.turns
        for _ in range(turns):
            for name, loop in loops.items():
                times[name].append(self.step_ms(loop, num_steps))
        return times

    def step_ms(self, loop: Loop, steps: int) -> float:
        """Returns the milliseconds a step of one turn."""
        synchronize(self.device)
        began = time.perf_counter()
        loop.run(steps)
        synchronize(self.device)
        return (time.perf_counter() - began) / steps * 1e3

    def kernels(self, loop: Loop) -> tuple[Counter[str], float]:
        """Returns the kernels a step by name, and the milliseconds in which one was under way.

        What runs once a fit is left out, as the difference of two fits.
        """
        kind = "kernel" if self.on_gpu else "cpu_op"
        fewer, more = (
            record(lambda steps=steps: loop.run(steps), self.device)
            for steps in (NUM_PROFILED, 2 * NUM_PROFILED)
        )
        found = Counter(counts(more, kind))
        found.subtract(counts(fewer, kind))
        busy = [busy_us([one for one in each if one.kind == kind]) for each in (fewer, more)]
        return found, (busy[1] - busy[0]) / NUM_PROFILED / 1e3


@dataclass(frozen=True)
class Loop:
    """A loop that trains, where its batches come from, and the most memory that steady steps take."""

    run: Run
    batches: Batches
    peak_gib: float = 0.0


Gate = Callable[[Bench], Iterator[Row]]
LEAST_SPEED = {"small_cnn": 0.95, "resnet50": 0.99, "gpt2": 0.99}


def eager(bench: Bench) -> Iterator[Row]:
    """Speed, memory and kernels of eventloop against the loop by hand, eager."""
    for name, workload in bench.workloads().items():
        with ExitStack() as stack:
            loops = bench.loops(stack, workload, {"plain": {"plain": True}, "ours": {}})
            yield from _against_plain(bench, "eager", name, loops)
        free()


def compiled(bench: Bench) -> Iterator[Row]:
    """The same, both compiled by torch.compile; and a step in CUDA graphs, by its mode reduce-overhead."""
    captured: Any = {"mode": "reduce-overhead"} if bench.on_gpu else {"backend": "aot_eager"}
    for name, workload in bench.workloads().items():
        torch.compiler.reset()
        given: dict[str, Any] = {
            "plain": {"plain": True, "compiled": True},
            "ours": {"compiled": True},
            "captured": {"compile": captured},
        }
        if name == "small_cnn":
            given["eager"] = {}
        with ExitStack() as stack:
            loops = bench.loops(stack, workload, given)
            times = yield from _against_plain(bench, "compiled", name, loops)
            if name == "small_cnn":
                what = f"{name}, captured, times as fast as eager"
                yield _ratio("graphs", what, times["eager"], times["captured"], least=2.5)
            else:
                what = f"{name}, captured, speed of compiled"
                yield _ratio("graphs", what, times["ours"], times["captured"], least=0.99)
        free()


def _against_plain(
    bench: Bench, gate: str, name: str, loops: Mapping[str, Loop]
) -> Generator[Row, None, dict[str, list[float]]]:
    """Yields the rows of a network; returns the times of all loops."""
    plain, ours = loops["plain"], loops["ours"]
    times = bench.by_turns(loops, slow=(100, 3 if gate == "eager" else 2))
    yield _ratio(gate, f"{name}, speed", times["plain"], times["ours"], least=LEAST_SPEED[name])
    if len(times["plain"]) > 1:
        yield _ratio(gate, f"{name}, noise", times["plain"][1:], times["plain"][:-1])
    yield Row(gate, f"{name}, plain ms a step", statistics.median(times["plain"]))
    if bench.on_gpu:
        ratio = ours.peak_gib / plain.peak_gib
        yield Row(gate, f"{name}, peak memory, of {plain.peak_gib:.2f} GiB", ratio, most=1.01)
    (kernels, busy), (our_kernels, our_busy) = (bench.kernels(one) for one in (plain, ours))
    other = {one: (kernels[one], our_kernels[one]) for one in {*kernels, *our_kernels}
             if kernels[one] != our_kernels[one]}  # fmt: skip
    print(f"{gate} {name}: other kernels in {NUM_PROFILED} steps (plain, ours): {other}")
    num, our_num = sum(kernels.values()), sum(our_kernels.values())
    yield Row(gate, f"{name}, kernels, of {num / NUM_PROFILED:g} a step", our_num / num, most=1.0)
    yield Row(gate, f"{name}, kernels' time, of {busy:.3f} ms", our_busy / busy, most=1.01)
    return times


def logging(bench: Bench) -> Iterator[Row]:
    """Loss and gradient's norm in each step, written as JSON Lines, against no log."""
    for name in [one for one in bench.workloads() if one != "small_cnn"]:
        given: dict[str, Any] = {
            "silent": {"clip_norm": 1.0},
            "logged": {"clip_norm": 1.0, "log_interval": "1ba", "callbacks": [Jsonl()],
                       "run_dir": bench.folder / f"logging-{name}"},
        }  # fmt: skip
        with ExitStack() as stack:
            times = bench.by_turns(bench.loops(stack, bench.workloads()[name], given))
        yield _ratio("logging", f"{name}, cost", times["logged"], times["silent"], most=1.01)
        free()


def inputs(bench: Bench) -> Iterator[Row]:
    """Batches from pinned memory, against batches that are on the device."""
    workload = workloads(tiny=not bench.on_gpu)["resnet50"]
    there = [(one.to(bench.device), other.to(bench.device)) for one, other in bench.made(workload)]
    with ExitStack() as stack:
        loops = bench.loops(stack, workload, {"there": {"batches": there}, "pinned": {}})
        times = bench.by_turns(loops)
    yield _ratio(
        "inputs", "resnet50, speed from pinned memory", times["there"], times["pinned"], least=0.97
    )
    free()


class Waits:
    """An algorithm that takes the time for which the loop waits for a checkpoint, but for those at a fit's end.

    Args:
        interval: at which multiples of batches checkpoints are saved.
    """

    name = "waits"

    def __init__(self, interval: int) -> None:
        self.ms: list[float] = []
        self._interval = interval

    @hookimpl(wrapper=True)
    def save_checkpoint(self, state: State) -> Generator[None, Any, Any]:
        """Takes the time, from when the device has nothing to do."""
        synchronize(state.device)
        began = time.perf_counter()
        path = yield
        if state.clock.batch % self._interval == 0:
            self.ms.append((time.perf_counter() - began) * 1e3)
        return path


def checkpoints(bench: Bench) -> Iterator[Row]:
    """A checkpoint every 100 steps of GPT-2, within one fit, whose end saves another and waits for it."""
    interval = 100 if bench.on_gpu else 5
    waits = Waits(interval)
    given: dict[str, Any] = {
        "none": {},
        "saved": {"checkpoint_interval": f"{interval}ba", "checkpoint_keep": 1, "algorithms": [waits],
                  "run_dir": bench.folder / "checkpoints"},
    }  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in given}
    with ExitStack() as stack:
        loops = bench.loops(stack, workloads(tiny=not bench.on_gpu)["gpt2"], given)
        for name in [*loops, *loops]:
            loops[name].batches.stamps.clear()
            loops[name].run(3 * interval + 1)
            stamps = loops[name].batches.stamps
            seconds[name].append(stamps[3 * interval] - stamps[0])
    yield _ratio("checkpoints", "gpt2, cost", seconds["saved"], seconds["none"], most=1.02)
    print("checkpoints, ms that the loop waited:", [round(one, 1) for one in waits.ms])
    yield Row("checkpoints", "gpt2, ms that the loop waits, at most", max(waits.ms), most=60.0)
    free()


def jitter(bench: Bench) -> Iterator[Row]:
    """The 99th percentile of 2,000 steps of the small network over their median."""
    num_steps = 2000 if bench.on_gpu else 200
    with ExitStack() as stack:
        loops = bench.loops(
            stack,
            workloads(tiny=not bench.on_gpu)["small_cnn"],
            {"plain": {"plain": True}, "ours": {}},
        )
        for name, loop in loops.items():
            loop.batches.stamps.clear()
            loop.run(num_steps)
            steps = [b - a for a, b in itertools.pairwise(loop.batches.stamps)]
            p99 = statistics.quantiles(steps, n=100)[-1]
            most = 1.2 if name == "ours" else None
            yield Row(
                "jitter",
                f"small_cnn, {name}, p99 over median",
                p99 / statistics.median(steps),
                most=most,
            )
    free()


def bandwidth(bench: Bench) -> Iterator[Row]:
    """What the weights' average and clipping compute, over what their memory traffic takes."""
    workload = workloads(tiny=not bench.on_gpu)["gpt2"]
    num_bytes = 4 * sum(one.numel() for one in workload.make_model().parameters())
    copied = torch.empty(num_bytes, dtype=torch.uint8, device=bench.device)
    into = torch.empty_like(copied)
    copy_ms = _copy_ms(bench, copied, into)
    del copied, into
    floor_ms = 1.5 * copy_ms  # two reads and a write, where a copy is one of each
    yield Row("bandwidth", "TB/s of a copy", 2 * num_bytes / copy_ms / 1e9)
    given: dict[str, Any] = {
        "neither": {},
        "ema": {"algorithms": [Ema()]},
        "clipping": {"clip_norm": 1.0},
    }
    with ExitStack() as stack:
        loops = bench.loops(stack, workload, given)
        busy = {name: bench.kernels(loop)[1] for name, loop in loops.items()}
        times = bench.by_turns(loops)
    for name in ("ema", "clipping"):
        added = busy[name] - busy["neither"]
        yield Row(
            "bandwidth",
            f"gpt2, {name}, {added:.3f} ms, of {floor_ms:.3f}",
            added / floor_ms,
            most=1.5,
        )
        yield _ratio("bandwidth", f"gpt2, {name}, time a step", times[name], times["neither"])
    free()


def _copy_ms(bench: Bench, source: torch.Tensor, into: torch.Tensor) -> float:
    times = []
    for _ in range(20):
        synchronize(bench.device)
        began = time.perf_counter()
        for _ in range(10):
            into.copy_(source)
        synchronize(bench.device)
        times.append((time.perf_counter() - began) / 10 * 1e3)
    return statistics.median(times)


def rivals(bench: Bench) -> Iterator[Row]:
    """Speed against Lightning, Hugging Face's Trainer and Accelerate, one after the other."""
    quiet()
    for name, workload in bench.workloads().items():
        least = 1.3 if name == "small_cnn" else 1.0
        times: dict[str, list[float]] = {}
        for _ in range(2 if bench.turns > 4 else 1):
            for who, train in {"eventloop": by_eventloop, **RIVALS}.items():
                times.setdefault(who, []).extend(_trained_by(bench, train, workload))
                free()
        told = {who: [round(one, 3) for one in each] for who, each in times.items()}
        print(f"rivals, {name}, ms a step: {told}")
        for who in RIVALS:
            if times[who] and len(times[who]) == len(times["eventloop"]):
                what = f"{name}, times as fast as {who}"
                yield _ratio("rivals", what, times[who], times["eventloop"], least=least)


def _trained_by(bench: Bench, train: Train, workload: Workload) -> list[float]:
    """Returns the milliseconds a step of each turn; none where it can't train here."""
    steps = bench.steps if workload.name == "small_cnn" else max(3, bench.steps // 5)
    stamps: list[float] = []

    def seen(idx: int) -> None:
        if idx and idx % steps == 0:
            synchronize(bench.device)
            stamps.append(time.perf_counter())

    num_steps = (1 + max(2, bench.turns // 2)) * steps + 1
    source = Source(bench.made(workload), num_steps, seen)
    try:
        train(workload, source, bench.device, num_steps)
    except Exception:  # noqa: BLE001  another version of it, or it isn't installed
        traceback.print_exc()
        return []
    return [(after - before) / steps * 1e3 for before, after in itertools.pairwise(stamps)]


def start(bench: Bench) -> Iterator[Row]:
    """Seconds from a process's start to its first step of the small network, beyond the loop by hand."""
    times: dict[str, list[float]] = {"plain": [], "ours": []}
    script = str(Path(__file__).with_name("gpu_first_step.py"))
    for _ in range(min(bench.turns, 4)):
        for name in times:
            began = time.time()
            done = subprocess.run([sys.executable, script, name, str(bench.device)],
                                  stdout=subprocess.PIPE, text=True, check=True)  # fmt: skip
            times[name].append(float(done.stdout) - began)
    print(
        "start, s to the first step:",
        {name: [round(x, 2) for x in one] for name, one in times.items()},
    )
    plain, ours = (min(times[one]) for one in ("plain", "ours"))
    yield Row(
        "start", f"small_cnn, s to the first step, beyond {plain:.2f}", ours - plain, most=1.0
    )


GATES: dict[str, Gate] = {
    one.__name__: one
    for one in (eager, jitter, bandwidth, logging, inputs, checkpoints, start, rivals, compiled)
}


def _ratio(gate: str, what: str, over: list[float], under: list[float], **bar: float) -> Row:
    """Returns the median of the turns' ratios."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    low, middle, high = (
        statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    )
    return Row(gate, what, middle, low, high, **bar)


def free() -> None:
    """Gives back what the last loops held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def show(machine: Mapping[str, Any], rows: Iterable[Row]) -> None:
    """Prints the table."""
    table = Table("gate", "what", "value", "quartiles", "bar", "")
    for row in rows:
        quartiles = "" if row.low is None else f"{row.low:.3f} to {row.high:.3f}"
        bar = "" if row.most is None else f"at most {row.most:g}"
        bar = bar if row.least is None else f"at least {row.least:g}"
        verdict = {None: "", True: "holds", False: "FALLS SHORT"}[row.holds]
        table.add_row(row.gate, row.what, f"{row.value:.3f}", quartiles, bar, verdict)
    console = Console(width=max(130, Console().width))
    console.print(table)
    named = ", ".join(f"{name} {value}" for name, value in machine.items() if value is not None)
    console.print(named, highlight=False)
    if machine["device"] == "CPU":
        console.print("there is no GPU: the networks are tiny, and these numbers mean nothing")


def main(arguments: list[str] | None = None) -> None:
    """Measures and prints; a gate that fails to run is told, and the next one runs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("gates", nargs="*", choices=[*GATES, []], help="default: all")
    what = "of eager, compiled, logging and rivals; default: all networks"
    parser.add_argument("--workload", action="append", default=[], choices=workloads(), help=what)
    parser.add_argument("--steps", type=int, default=100, help="steps a turn")
    parser.add_argument("--turns", type=int, default=8, help="turns of each loop")
    parser.add_argument("--seconds", type=float, default=1e9, help="no gate begins later")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the rows here, after each gate")
    parser.add_argument("--list", action="store_true", help="print the gates, and end")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{name:12} {one.__doc__}" for name, one in GATES.items()))
        return
    device, began = torch.device(options.device), time.monotonic()
    warnings.filterwarnings(
        "ignore", message="the train data loader is a Batches"
    )  # none is resumed
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
        some = torch.ones(256, 256, device=device, dtype=torch.bfloat16)
        # The memory that cuBLAS keeps, for each thread, isn't that of the first loop.
        torch.mm(some.requires_grad_(), some).sum().backward()
    machine, rows = machine_of(device), []
    with tempfile.TemporaryDirectory(prefix="gates-") as folder:
        bench = Bench(device, options.turns, options.steps, Path(folder), options.workload)
        for name in options.gates or GATES:
            since = time.monotonic()
            if since - began > options.seconds:
                print(f"{name}: no time is left")
                continue
            try:
                for row in GATES[name](bench):
                    rows.append(row)
                    print(
                        f"{row.gate}: {row.what}: {row.value:.4f} ({row.low}, {row.high}) {row.holds}",
                        flush=True,
                    )
            except Exception:  # noqa: BLE001  the others are measured
                traceback.print_exc()
                free()
            print(f"{name}: {time.monotonic() - since:.0f} s", flush=True)
            if options.json:
                told = {"machine": machine, "rows": [dataclasses.asdict(one) for one in rows]}
                options.json.write_text(json.dumps(told, indent=1))
    show(machine, rows)


if __name__ == "__main__":
    main()
