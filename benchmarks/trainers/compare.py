"""Compares trainers: the time of a step beside a hand-written loop, and whether a killed run resumes exactly.

    python benchmarks/trainers/compare.py [--rounds 9] [--only with_eventloop ...] [--write]

**Step.** Each trainer trains the same models on the same data, without logging, progress and checkpoints,
in one thread, in a process of its own. In each round all trainers take turns, the hand-written loop first
and last; a trainer's time is divided by the mean of these two. The table has the median of the rounds and
their quartiles; the row of the hand-written loop has its last turn over its first, which is the noise.

**Resume.** A run of three epochs saves a checkpoint every 20 steps (the hand-written loop: after each epoch)
and is killed with SIGKILL in the middle of the third. The same command resumes it. It is exact if the weights
have the same bits as those of a run that wasn't killed. Each trainer saves and resumes as its documents advise.

Trainers that aren't installed are rows with the reason. Lightning, Composer, Transformers, ignite and torchdata come
from `pip`; `--write` writes `results.json`, from which `python docs/build_trainers.py` draws the chart.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results.json"
BY_HAND = "by_hand"
TRAINERS = {
    BY_HAND: "hand-written loop",
    "with_eventloop": "eventloop",
    "with_ignite": "ignite",
    "with_lightning": "Lightning",
    "with_hugging_face": "Hugging Face Trainer",
    "with_composer": "Composer",
}
NUM_STEPS = {"perceptron": 400, "convolutional": 60}
RESUME = {"steps_per_epoch": 32, "num_epochs": 3}
KILLED_AT_STEP = 75
# Each scenario of a kill, and whether the data set draws noise for each sample.
SCENARIOS = {"shuffled data, dropout": False, "with random augmentation": True}


class WorkerError(Exception):
    """A worker has ended without a result."""


class Worker:
    """A process that trains with one trainer; it must have started `worker.py`.

    Args:
        process: the process.
        errors: the file to which it writes its standard error.
    """

    def __init__(self, process: subprocess.Popen[str], errors: IO[str]) -> None:
        self._process = process
        self._errors = errors
        self.facts: dict[str, Any] = self._result()

    def request(self, function: str, **arguments: Any) -> Any:
        """Calls a function of `worker.py`; returns its result.

        Raises:
            WorkerError: the process has ended.
        """
        assert self._process.stdin is not None
        print(json.dumps({"function": function, **arguments}), file=self._process.stdin, flush=True)
        return self._result()

    def _result(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, _, result = line.partition(" ")
            if word == "RESULT":
                return json.loads(result)
        self._process.wait()
        self._errors.seek(0)
        last_line = "".join(self._errors.read().strip().splitlines()[-1:])
        raise WorkerError(last_line or f"exit status {self._process.returncode}")


@contextmanager
def worker_of(module: str) -> Iterator[Worker]:
    """A worker that ends with the block."""
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, str(FOLDER / "worker.py"), module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        ) as process,
    ):
        try:
            yield Worker(process, errors)
        finally:
            process.kill()


def measure_steps(workers: Mapping[str, Worker], model: str, num_rounds: int) -> dict[str, Any]:
    """Returns quartiles of each trainer's time of a step over that of the hand-written loop."""
    ratios: dict[str, list[float]] = {module: [] for module in workers}
    by_hand_times = []
    others = [module for module in workers if module != BY_HAND]
    request = {"model": model, "num_steps": NUM_STEPS[model]}
    for module in workers:  # a first turn that isn't counted
        workers[module].request("step_time", **request)
    for round_idx in track(range(num_rounds), model, console=Console(stderr=True)):
        first = workers[BY_HAND].request("step_time", **request)
        order = others if round_idx % 2 == 0 else others[::-1]
        times = {module: workers[module].request("step_time", **request) for module in order}
        last = workers[BY_HAND].request("step_time", **request)
        by_hand_times += [first, last]
        ratios[BY_HAND].append(last / first)
        for module, seconds in times.items():
            ratios[module].append(seconds / ((first + last) / 2))
    return {
        "by_hand_ms": 1000 * statistics.median(by_hand_times),
        "ratios": {
            module: statistics.quantiles(values, method="inclusive")
            for module, values in ratios.items()
        },
    }


def resume(module: str, augments: bool) -> dict[str, Any]:
    """Returns whether a run that was killed and resumed has the weights of one that wasn't.

    Args:
        module: the module of the trainer.
        augments: whether the data set draws noise for each sample that is read.
    """
    with tempfile.TemporaryDirectory() as parent:

        def train(name: str, kill_at_step: int | None = None) -> str:
            folder = str(Path(parent, name))
            request = {"folder": folder, "augments": augments, "kill_at_step": kill_at_step}
            with worker_of(module) as worker:
                digest: str = worker.request("trained_weights", **request, **RESUME)
                return digest

        expected = train("whole")
        repeated = train("repeated")
        with suppress(WorkerError):  # killed
            train("killed", kill_at_step=KILLED_AT_STEP)
            raise RuntimeError(f"{module} ended before step {KILLED_AT_STEP}")
        reads = Path(parent, "killed.reads")
        num_reads = reads.stat().st_size
        try:
            resumed = train("killed")
        except WorkerError as error:
            return {"problem": str(error)}
        return {
            "is_repeatable": repeated == expected,
            "is_exact": resumed == expected,
            "num_read_after_resume": reads.stat().st_size - num_reads,
        }


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Any] = {}
    with ExitStack() as stack:
        workers = {}
        for module in dict.fromkeys([BY_HAND, *options.only]):
            try:
                worker = stack.enter_context(worker_of(module))
            except WorkerError as error:
                rows[module] = {"name": TRAINERS[module], "problem": str(error)}
            else:
                workers[module] = worker
                rows[module] = {"name": TRAINERS[module], **worker.facts}
        for model in NUM_STEPS:
            steps[model] = measure_steps(workers, model, options.rounds)
    for module in workers:
        for name, augments in SCENARIOS.items():
            rows[module][name] = resume(module, augments)
    results = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rounds": options.rounds,
        "steps": steps,
        "trainers": rows,
    }
    Console(width=120).print(table_of(results))
    if options.write:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def table_of(results: Mapping[str, Any]) -> Table:
    """Returns the results as a table."""
    table = Table("trainer", "version", *results["steps"], *SCENARIOS)
    for module, row in results["trainers"].items():
        if "problem" in row:
            table.add_row(row["name"], row["problem"])
            continue
        cells = []
        for step in results["steps"].values():
            low, median, high = step["ratios"][module]
            unit = f" of {step['by_hand_ms']:.2f} ms" if module == BY_HAND else ""
            cells.append(f"{median:.2f} ({low:.2f} to {high:.2f}){unit}")
        cells += [resume_text(row[name]) for name in SCENARIOS]
        table.add_row(row["name"], row["version"], *cells)
    return table


def resume_text(outcome: Mapping[str, Any]) -> str:
    """Returns the outcome of a kill as the text of a cell."""
    if "problem" in outcome:
        return f"fails: {outcome['problem']}"
    if not outcome["is_repeatable"]:
        return "not repeatable"
    return "exact" if outcome["is_exact"] else "other weights"


if __name__ == "__main__":
    main()
