"""Measures how long a sweep needs from the end of one trial to the first batch of the next.

    python benchmarks/run_gaps.py [--gaps 10] [-- OPTIONS OF THE SWEEP]

It sweeps `examples/digits.py`, one trial at a time, and prints the median of each part: the fit's end
counts from `fit_end`, so that the last checkpoint and the end of the process are in it. Each part also
has the processor time that the new trial used for it, which other load on the machine changes less.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from eventloop import hookimpl

DIGITS = Path(__file__).parents[1] / "examples" / "digits.py"
_FILE = "RUN_GAPS_FILE"
_OF_THE_END = ("fit_end", "close")
_PARTS = (
    ("fit's end, up to close", "fit_end", "close"),
    ("end of the process, next trial, fork", "close", "imported"),
    ("plugins and task", "imported", "init"),
    ("model, optimizer, checkpoint", "init", "after_load"),
    ("up to the first batch", "after_load", "batch_start"),
    ("in all", "fit_end", "batch_start"),
)


def _note(moment: str) -> None:
    with Path(os.environ[_FILE]).open("a") as file:
        file.write(f"{os.getpid()} {moment} {time.monotonic()} {time.process_time()}\n")


class Moments:
    """Notes when a trial reaches what; each the first time."""

    role = "callback"

    def __init__(self) -> None:
        self._noted: set[str] = set()

    @hookimpl
    def init(self) -> None:
        """Notes that the model is there."""
        self._once("init")

    @hookimpl
    def after_load(self) -> None:
        """Notes that the run is built."""
        self._once("after_load")

    @hookimpl
    def batch_start(self) -> None:
        """Notes the first batch."""
        self._once("batch_start")

    @hookimpl(tryfirst=True)
    def fit_end(self) -> None:
        """Notes the end of the fit."""
        self._once("fit_end")

    @hookimpl
    def close(self) -> None:
        """Notes the end of the run."""
        self._once("close")

    def _once(self, moment: str) -> None:
        if moment not in self._noted:
            self._noted.add(moment)
            _note(moment)


def main() -> None:
    """Sweeps, and prints a line for each part."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gaps", type=int, default=10)
    parser.add_argument("options", nargs="*")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        marks = Path(folder, "marks")
        what = ["--task.lr=log:0.01:0.5", f"--trials={arguments.gaps + 2}", "--jobs=1"]
        run = [f"--run-dir={folder}/sweep", "--max-duration=2ep", f"-p{__file__}:Moments"]
        subprocess.run(
            [
                sys.executable,
                "-m",
                "eventloop",
                "sweep",
                str(DIGITS),
                *what,
                *run,
                *arguments.options,
            ],
            env=os.environ | {_FILE: str(marks)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        lines = marks.read_text().splitlines()
    runs: dict[str, dict[str, tuple[float, float]]] = collections.defaultdict(dict)
    for pid, moment, wall, cpu in map(str.split, lines):
        runs[pid].setdefault(moment, (float(wall), float(cpu)))
    trials = [one for one in runs.values() if "batch_start" in one and "fit_end" in one]
    pairs = [*itertools.pairwise(trials)][-arguments.gaps :]
    for name, begin, end in _PARTS:
        walls, cpus = [], []
        for before, after in pairs:
            first = before if begin in _OF_THE_END else after
            last = before if end in _OF_THE_END else after
            walls.append(last[end][0] - first[begin][0])
            cpus.append(last[end][1] - (first[begin][1] if first is last else 0.0))
        wall, cpu = (statistics.median(values) * 1000 for values in (walls, cpus))
        span = f"{min(walls) * 1000:5.0f} to {max(walls) * 1000:5.0f}"
        print(f"{name:36} {wall:6.0f} ms, {span}; processor {cpu:5.0f} ms")


if __name__ == "__main__":
    main()
else:
    if _FILE in os.environ:
        _note("imported")
