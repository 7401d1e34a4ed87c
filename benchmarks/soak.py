"""Kills a run at random moments, again and again, and compares it with one that wasn't.

    python benchmarks/soak.py --kills 100 --seed 1
    python benchmarks/soak.py --kills 10 --ranks 2
    python benchmarks/soak.py --kills 20 --workers 2
    python benchmarks/soak.py --kills 200 --set-ups 20 --workers 2
    python benchmarks/soak.py --kills 20 --ranks 4 --in-saves -- -p fsdp --fsdp.meta true

Every kill is SIGKILL, a third of them while the run starts; with several ranks it hits one of them,
their launcher, or all. Whoever is left has to end within 10 s. At the end weights, optimizer,
generators, plugins' states, results and the log must be the same, byte for byte. A run that is
complete before the kills are done is compared, too, and another begins. With --set-ups each has a data
loader and algorithms of its own, drawn from the seed; with --in-saves every kill waits for a save.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from soak_task import set_up

from eventloop.checkpoint.checkpoint_files import read_checkpoint
from eventloop.checkpoint.part_differences import differences
from eventloop.checkpoint.store import Store

TASK = Path(__file__).with_name("soak_task.py")
START_UP_FRAC = 1 / 3  # of the kills
END_S = 10.0  # for those that are left, after one of them was killed
Numbers = dict[tuple[int, str], object]


class Run:
    """A run in a folder of its own.

    Args:
        folder: of the run.
        ranks: how many processes train.
        options: more of the command line.
        set_up: which loader and algorithms are trained with, by `soak_task.set_up`.
    """

    def __init__(self, folder: Path, ranks: int, options: list[str], set_up: str = "") -> None:
        self.folder = folder
        self.checkpoints = Store(folder / "checkpoints")
        self._ranks = ranks
        self._set_up = set_up
        self._numbers = folder / "metrics.jsonl"
        self._log = folder.with_suffix(".txt")
        self._command = [sys.executable, "-m", "eventloop", "fit", str(TASK), "--no-plugins"]
        self._command += ["--run-dir", str(folder), *options]
        self._command += ["--nproc", str(ranks)] if ranks > 1 else []

    def start(self, workers: int = 0) -> subprocess.Popen[bytes]:
        """Starts it, or goes on with it.

        Args:
            workers: how many processes load the data.
        """
        variables = {"OMP_NUM_THREADS": "1", "SOAK_WORKERS": str(workers)}
        variables["SOAK_SET_UP"] = self._set_up
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._command, stdout=log, stderr=log, env=os.environ | variables
            )

    def timed(self) -> tuple[float, float]:
        """Goes on until it is done; gives the seconds until the first checkpoint, and from then on."""
        begin = time.perf_counter()
        process, first = self.start(), None
        while process.poll() is None:
            if first is None and any(self.checkpoints.folder.glob("ba*")):
                first = time.perf_counter()
            time.sleep(0.02)
        if first is None:
            sys.exit(f"the run in {self.folder} saved nothing:\n{self.tail()}")
        self.require_success(process)
        return first - begin, time.perf_counter() - first

    def require_success(self, process: subprocess.Popen[bytes]) -> None:
        """Waits for its end; ends this test if it failed."""
        if process.wait():
            status = process.returncode
            sys.exit(f"the run in {self.folder} ended with status {status}:\n{self.tail()}")

    def tail(self) -> str:
        """Returns the end of what it printed."""
        return self._log.read_text(errors="replace")[-3000:]

    def position(self) -> int | None:
        """Returns the batch of the newest checkpoint that verifies."""
        path, _ = self.checkpoints.latest()
        return None if path is None else int(path.name[2:])

    def ranks_of(self, process: subprocess.Popen[bytes]) -> list[int]:
        """Returns the processes that a launcher has started, in order of rank (Linux)."""
        return list(_children(process.pid)) if self._ranks > 1 else []

    def wait_for_batches(self, process: subprocess.Popen[bytes]) -> None:
        """Waits until it trains, or ends."""
        before = self._num_bytes_of_log()
        while process.poll() is None and self._num_bytes_of_log() == before:
            time.sleep(0.01)

    def saves_under_way(self) -> set[str]:
        """Returns the folders of checkpoints that aren't whole."""
        return {one.name for one in self.checkpoints.folder.glob(".tmp-*")}

    def wait_for_save(self, process: subprocess.Popen[bytes]) -> None:
        """Waits until a checkpoint is being written, or the run ends."""
        before = self.saves_under_way()
        while process.poll() is None and self.saves_under_way() <= before:
            time.sleep(0.0005)

    def numbers(self) -> Numbers:
        """Returns the log: what was logged last counts, where a batch was done twice."""
        rows = map(json.loads, self._numbers.read_text().splitlines())
        return {(row["batch"], row["name"]): row["value"] for row in rows}

    def description(self) -> str:
        """Returns the loader and the algorithms of its set-up."""
        loader, algorithms = set_up(self._set_up)
        return f"{loader}, {', '.join(algorithms)}"

    def forget(self) -> None:
        """Removes it, so that another begins."""
        shutil.rmtree(self.folder)

    def _num_bytes_of_log(self) -> int:
        return self._numbers.stat().st_size if self._numbers.exists() else 0


class Soak:
    """Kills one run again and again.

    Args:
        run: the one to kill.
        whole: the one to compare it with, complete.
        draw: what moments, victims and workers are drawn from.
        workers: the most processes that load the data.
        in_saves: whether kills wait for a save.
    """

    def __init__(
        self, run: Run, whole: Run, draw: random.Random, workers: int, *, in_saves: bool = False
    ) -> None:
        self._run = run
        self._whole = whole
        self._draw = draw
        self._workers = workers
        self._in_saves = in_saves
        self.num_in_saves = 0
        self.kinds: Counter[str] = Counter()
        self.wrong: list[str] = []

    def kill(self, num_kills: int, start_up: float, training: float) -> None:
        """Kills so many times, and lets the run be completed.

        Args:
            start_up: seconds until it trains.
            training: seconds that it trains.
        """
        # Far enough on average that the run ends with the kills.
        reach = 2 * training / (num_kills * (1 - START_UP_FRAC))
        num_done = 0
        while num_done < num_kills:
            process = self._run.start(self._draw.randint(0, self._workers))
            left = self._run.saves_under_way()
            is_early = not self._in_saves and self._draw.random() < START_UP_FRAC
            if not is_early:
                self._run.wait_for_batches(process)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self._draw.uniform(0, start_up if is_early else reach))
                self._complete(process)
                self._run.forget()
                continue
            before = self._run.position()
            if self._in_saves:
                self._run.wait_for_save(process)
            is_save = bool(self._run.saves_under_way() - left)
            if process.poll() is not None:
                continue  # it ended meanwhile, and is compared when it is started again
            whom = self._kill(process)
            num_done += 1
            self.num_in_saves += is_save
            after = self._run.position()
            if before is not None and (after is None or after < before):
                self.wrong.append(f"kill {num_done}: checkpoint {before} was lost; {after} is left")
            when = "in a save" if is_save else "at the start" if is_early else "in training"
            print(f"kill {num_done:3}: {whom:11} {when:12}, newest checkpoint {after}")
        self._complete(self._run.start())

    def _kill(self, process: subprocess.Popen[bytes]) -> str:
        """Kills somebody, and sees that the others end; says whom."""
        ranks = self._run.ranks_of(process)
        victims = {"all": [process.pid, *ranks]}
        if ranks:
            victims |= {f"rank {rank}": [pid] for rank, pid in enumerate(ranks)}
            victims["launcher"] = [process.pid]
        # Each as often as the others, in an order of chance.
        fewest = min(self.kinds[name] for name in victims)
        whom = self._draw.choice([one for one in victims if self.kinds[one] == fewest])
        self.kinds[whom] += 1
        for pid in victims[whom]:
            os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + END_S
        process.poll()
        while alive := [pid for pid in {process.pid, *ranks} if _is_alive(pid)]:
            if time.monotonic() > end:
                self.wrong.append(f"{whom} was killed, and {len(alive)} others didn't end")
                for pid in alive:
                    os.kill(pid, signal.SIGKILL)
                end = float("inf")
            process.poll()
            time.sleep(0.02)
        return whom

    def _complete(self, process: subprocess.Popen[bytes]) -> None:
        """Compares the run when it is done."""
        self._run.require_success(process)
        found = list(compare(self._whole, self._run))
        self.wrong += found
        print(f"complete: {'it differs' if found else 'the same, byte for byte'}")


def main() -> None:
    """Runs the test; status 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0, help="load in 0 to so many processes")
    parser.add_argument("--set-ups", type=int, default=0, help="so many loaders and mixtures")
    parser.add_argument("--in-saves", action="store_true", help="kill while a save is under way")
    parser.add_argument("--keep", type=Path, help="leave the folders here")
    parser.add_argument("options", nargs="*", help="more of `eventloop fit`, after --")
    given = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    begin = time.monotonic()
    draw, kinds, wrong, num_in_saves = random.Random(given.seed), Counter[str](), [], 0
    num_set_ups = max(given.set_ups, 1)
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        for idx in range(num_set_ups):
            set_up = f"{given.seed}-{idx}" if given.set_ups else ""
            folder = (given.keep or Path(scratch)) / set_up
            folder.mkdir(parents=True, exist_ok=True)
            whole = Run(folder / "whole", given.ranks, given.options, set_up)
            killed = Run(folder / "killed", given.ranks, given.options, set_up)
            start_up, training = whole.timed()
            print(
                f"uninterrupted: {start_up:.1f} s until the first checkpoint, then {training:.1f} s"
            )
            if set_up:
                print(f"set-up {set_up}: {whole.description()}")
            soak = Soak(killed, whole, draw, given.workers, in_saves=given.in_saves)
            num_kills = given.kills * (idx + 1) // num_set_ups - given.kills * idx // num_set_ups
            soak.kill(num_kills, start_up, training)
            kinds += soak.kinds
            wrong += [f"{set_up} {one}".strip() for one in soak.wrong]
            num_in_saves += soak.num_in_saves
    whom = ", ".join(f"{name} {count}x" for name, count in sorted(kinds.items()))
    seconds = time.monotonic() - begin
    print(f"{given.kills} kills, {num_in_saves} of them in a save ({whom}), in {seconds:.0f} s")
    print("\n".join(wrong) or "all is the same, byte for byte")
    sys.exit(bool(wrong))


def compare(whole: Run, killed: Run) -> Iterator[str]:
    """Yields what differs at the end of two runs."""
    paths = [run.checkpoints.latest()[0] for run in (whole, killed)]
    if None in paths:
        yield f"a run has no checkpoint: {paths}"
        return
    first, second = (read_checkpoint(path) for path in paths if path is not None)
    if first.batch != second.batch:
        yield f"one ended at batch {first.batch}, the other at {second.batch}"
    for one in differences(first.parts, second.parts):
        yield f"{one.path}: {one.first} / {one.second}"
    numbers, others = whole.numbers(), killed.numbers()
    for key in sorted({**numbers, **others}):
        if numbers.get(key) != others.get(key):
            yield f"log, batch {key[0]}, {key[1]}: {numbers.get(key)} / {others.get(key)}"


def _children(pid: int) -> Iterator[int]:
    """Yields the processes that one has started, the oldest first."""
    with contextlib.suppress(OSError):
        yield from map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def _is_alive(pid: int) -> bool:
    """Returns whether a process runs; one that nobody has waited for yet doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    main()
