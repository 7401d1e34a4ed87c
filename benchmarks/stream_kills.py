"""Kills a training on each kind of train data with SIGKILL at random moments, and compares the bits.

Each kind is trained on for two epochs in one go, with a checkpoint after each batch, and once more in processes
that are killed while they start, read, train or save. Weights, optimizer, generators and results must end as
in the run in one go. Kinds whose library isn't installed are left out, and named.

    python benchmarks/stream_kills.py [--kills 20] [--kind PART_OF_NAME] [--seed 0]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from stream_kinds import KINDS, Make, prepare
from stream_resume import numbers_of

from eventloop import Task, hookimpl
from eventloop.checkpoint.part_differences import differences
from eventloop.distributed.process_ends import kill_group
from eventloop_testing import isolated_trainer, last_checkpoint

MOST_BATCHES = 6  # that a process trains before it is killed
MOST_S = 0.05  # and then the longest wait
HANGS_S = 300.0
POSITION = "rank0/feed/position/"


def fit(folder: Path, make: Make, pipe: int) -> None:
    """Trains two epochs, or goes on; writes a byte for each batch."""

    class Tells:
        name = "tells"

        @hookimpl
        def batch_start(self, state: Any) -> None:
            os.write(pipe, b".")

    def loss(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        numbers = numbers_of(batch).float().view(-1, 1) / 1_000
        return {"loss": (model(numbers) - numbers.sin()).square().mean()}

    task = Task(
        model=lambda: nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.1), nn.Linear(8, 1)),
        train_dataloader=make,
        forward=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    )
    given = {"max_duration": "2ep", "checkpoint_interval": "1ba"}
    with isolated_trainer(folder, task, callbacks=[Tells()], **given) as trainer:
        trainer.fit()


def warm_up() -> None:
    """Imports whatever a training does, so that forks start at once."""
    with tempfile.TemporaryDirectory() as name, Path(os.devnull).open("wb") as nothing:
        fit(Path(name), lambda: [torch.arange(4)], nothing.fileno())


class Process:
    """A training in a fork, in a session of its own.

    Args:
        folder: of the run.
        make: makes its train data.
    """

    def __init__(self, folder: Path, make: Make) -> None:
        self._pipe, theirs = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            self._train(folder, make, theirs)
        os.close(theirs)

    def wait_for(self, num_batches: int) -> bool:
        """Waits until it begins so many batches; returns whether it ended before."""
        num_read = 0
        while num_read < num_batches:
            if not select.select([self._pipe], [], [], HANGS_S)[0]:
                raise TimeoutError(f"no batch for {HANGS_S} s")
            told = os.read(self._pipe, min(num_batches - num_read, 1_000))
            if not told:
                return True
            num_read += len(told)
        return False

    def end(self) -> int:
        """Kills it alone, as the kernel would; returns its exit status, negative if it was killed."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return self.status()

    def status(self) -> int:
        """Waits until it ends; returns its exit status, negative if it was killed."""
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self._pipe)
        return status

    def _train(self, folder: Path, make: Make, pipe: int) -> None:
        os.setsid()
        os.close(self._pipe)
        torch.set_num_threads(1)
        status = 1
        try:
            fit(folder, make, pipe)
            status = 0
        except BaseException:  # noqa: BLE001  nothing else prints it
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)


def killed(make: Make, num_kills: int, draw: random.Random) -> dict[str, Any]:
    """Returns how many kills a kind of train data had, and what differed in the end."""
    folder = Path(tempfile.mkdtemp())
    sessions: list[int] = []
    try:
        begin = time.perf_counter()
        process = Process(folder / "whole", make)
        sessions.append(process.pid)
        process.wait_for(1)
        start_up_s = time.perf_counter() - begin
        process.wait_for(sys.maxsize)
        if process.status():
            return {"refused": "the run in one go failed"}
        whole = last_checkpoint(folder / "whole").parts
        found: dict[str, Any] = {"kills": 0, "at start": 0, "runs": 0, "differing": []}
        is_over = False
        while not (is_over and found["kills"] >= num_kills):
            own = folder / str(found["runs"])
            process = Process(own, make)
            sessions.append(process.pid)
            is_last = found["kills"] >= num_kills
            num = sys.maxsize if is_last else draw.randrange(MOST_BATCHES + 1)
            is_over = process.wait_for(num)
            if not is_over:
                time.sleep(draw.uniform(0, MOST_S if num else start_up_s))
            status = process.status() if is_over else process.end()
            if status == -signal.SIGKILL:
                found["kills"] += 1
                found["at start"] += not num
                is_over = False
            elif status:
                return {**found, "refused": "a resumed run failed"}
            else:
                is_over = True
                found["runs"] += 1
                paths = [one.path for one in differences(whole, last_checkpoint(own).parts)]
                # Behind the last sample, `datasets` count an empty shard or don't.
                found["differing"] += [one for one in paths if not one.startswith(POSITION)]
        return found
    finally:
        for pid in sessions:
            kill_group(pid)  # workers that haven't noticed yet
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--kind", action="append", help="a part of a kind's name; may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    warm_up()
    table = Table(title=f"{given.kills} kills of a training on each kind of train data")
    for column in ("train data", "kills", "of them at the start", "differing"):
        table.add_column(column)
    for name, kind in KINDS.items():
        if given.kind and not any(part in name for part in given.kind):
            continue
        missing = prepare(kind)
        if missing:
            table.add_row(name, "", "", f"not installed: {', '.join(missing)}")
            continue
        found = killed(kind.make, given.kills, random.Random(f"{given.seed} {name}"))
        said = found.get("refused") or ", ".join(found["differing"][:3]) or "nothing"
        table.add_row(name, str(found.get("kills", "")), str(found.get("at start", "")), said)
        print(f"{name}: {found}", file=sys.stderr, flush=True)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
