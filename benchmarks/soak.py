"""Kills a run at random moments, again and again, and compares it with one that wasn't.

    python benchmarks/soak.py --kills 100 --seed 1
    python benchmarks/soak.py --kills 10 --ranks 2

Every kill is SIGKILL; with several ranks it hits one of them, or all with their launcher. At the
end weights, optimizer, generators, plugins' states and the log must be the same, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from eventloop.checkpoint.compare import differences
from eventloop.checkpoint.format import read
from eventloop.checkpoint.store import Store

TASK = Path(__file__).with_name("soak_task.py")
Numbers = dict[tuple[int, str], float]


class Run:
    """A run in a folder of its own.

    Args:
        folder: of the run.
        ranks: how many processes train.
        options: more of the command line.
    """

    def __init__(self, folder: Path, ranks: int, options: list[str]) -> None:
        self.folder = folder
        self._log = folder.with_suffix(".txt")
        self._command = [sys.executable, "-m", "eventloop", "fit", str(TASK), "--no-plugins"]
        self._command += ["--run-dir", str(folder), *options]
        self._command += ["--nproc", str(ranks)] if ranks > 1 else []

    def start(self) -> subprocess.Popen[bytes]:
        """Starts it, or goes on with it, in a group of processes of its own."""
        threads = {"OMP_NUM_THREADS": "1"}
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                env=os.environ | threads,
                start_new_session=True,
            )

    def finish(self) -> None:
        """Goes on until it is done."""
        status = self.start().wait()
        if status:
            sys.exit(f"the run in {self.folder} ended with status {status}:\n{self.tail()}")

    def timed(self) -> tuple[float, float]:
        """Goes on until it is done; gives the seconds until the first checkpoint, and from then on."""
        begin = time.perf_counter()
        process, first = self.start(), None
        while process.poll() is None:
            if first is None and any((self.folder / "checkpoints").glob("ba*")):
                first = time.perf_counter()
            time.sleep(0.02)
        if process.returncode or first is None:
            sys.exit(f"the run in {self.folder} ended with {process.returncode}:\n{self.tail()}")
        return first - begin, time.perf_counter() - first

    def tail(self) -> str:
        """Gives the end of what it printed."""
        return self._log.read_text(errors="replace")[-3000:]

    def position(self) -> int | None:
        """Gives the batch of the newest checkpoint that verifies."""
        path, _ = Store(self.folder / "checkpoints").latest()
        return None if path is None else int(path.name[2:])

    def numbers(self) -> Numbers:
        """Gives the log: what was logged last counts, where a batch was done twice."""
        path = self.folder / "metrics.jsonl"
        rows = map(json.loads, path.read_text().splitlines())
        return {(row["batch"], row["name"]): row["value"] for row in rows}


def main() -> None:
    """Runs the test; status 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="leave the folders here")
    parser.add_argument("options", nargs="*", help="more of `eventloop fit`, after --")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        folder = given.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        whole = Run(folder / "whole", given.ranks, given.options)
        killed = Run(folder / "killed", given.ranks, given.options)
        start_up, training = whole.timed()
        print(f"uninterrupted: {start_up:.1f} s until the first checkpoint, then {training:.1f} s")
        # Far enough on average that the run ends with the kills.
        reach = start_up + 2.5 * training / given.kills
        kill_often(killed, given.kills, random.Random(given.seed), reach)
        killed.finish()
        wrong = list(compare(whole, killed))
    print("\n".join(wrong) or "the same, byte for byte")
    sys.exit(bool(wrong))


def kill_often(run: Run, num_kills: int, draw: random.Random, reach: float) -> None:
    """Starts a run and kills it, again and again, each time after at most so many seconds."""
    done = 0
    while done < num_kills:
        process = run.start()
        moment = draw.uniform(0, reach)
        time.sleep(moment)
        if process.poll() is not None:
            if process.returncode:
                sys.exit(f"it ended with status {process.returncode}:\n{run.tail()}")
            print("complete before the kills were done: begun anew")
            _forget(run)
            continue
        whom = kill(process, draw)
        done += 1
        print(f"kill {done:3}: {whom} after {moment:5.1f} s, newest checkpoint {run.position()}")


def kill(process: subprocess.Popen[bytes], draw: random.Random) -> str:
    """Kills the process and its children, or one rank, whose end must end the others; says whom."""
    ranks = list(_children(process.pid))
    if ranks and draw.random() < 0.6:
        idx = draw.randrange(len(ranks))
        os.kill(ranks[idx], signal.SIGKILL)
        process.wait(timeout=60)
        return f"rank {idx}"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return "all"


def compare(whole: Run, killed: Run) -> Iterator[str]:
    """Gives what differs at the end of two runs."""
    paths = [Store(run.folder / "checkpoints").latest()[0] for run in (whole, killed)]
    if None in paths:
        yield f"a run has no checkpoint: {paths}"
        return
    first, second = (read(path) for path in paths if path is not None)
    if first.batch != second.batch:
        yield f"one ended at batch {first.batch}, the other at {second.batch}"
    for one in differences(first.parts, second.parts):
        yield f"{one.path}: {one.first} / {one.second}"
    numbers, others = whole.numbers(), killed.numbers()
    for key in sorted({**numbers, **others}):
        if numbers.get(key) != others.get(key):
            yield f"log, batch {key[0]}, {key[1]}: {numbers.get(key)} / {others.get(key)}"


def _children(pid: int) -> Iterator[int]:
    """Gives the ranks that a launcher has started (Linux)."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return
    yield from map(int, text.split())


def _forget(run: Run) -> None:
    for path in sorted(run.folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


if __name__ == "__main__":
    main()
