"""Checkpoints: how long one stops the training, and what one every 100 steps costs.

First the stall: the loop's wait for one save, which a thread writes, beside `torch.save` of the same
content, with and without waiting for the disk; the network has some millions of parameters and AdamW.
Then the cost: examples/charlm.py with a checkpoint every 100 batches and with none, turn by turn in
one run; the ratio of the medians is what checkpoints cost.

    python benchmarks/checkpoint.py [--width 2048] [--batches 400] [--pairs 5] [--json]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils._pytree import tree_leaves

from eventloop import State, hookimpl
from eventloop_testing import isolated_trainer, tiny_task

CHARLM = Path(__file__).parents[1] / "examples" / "charlm.py"


def main() -> None:
    """Measures, and writes two tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=2048, help="of the network that is saved")
    parser.add_argument("--batches", type=int, default=400, help="of a turn of charlm")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
        found = {
            "stall": stall(Path(folder), given.width, given.pairs),
            "cost": cost(Path(folder), given.batches, given.pairs),
        }
    if given.json:
        print(json.dumps(found))
        return
    for name, rows in found.items():
        table = Table("what", "median", title=name)
        for what, value in rows.items():
            table.add_row(what, f"{value:.4g}")
        Console().print(table)


class Watch:
    """An algorithm that takes the time of saves.

    Attributes:
        waits: seconds that the loop waited for each.
        begin: when the latest began.
        content: what the latest checkpoint holds.
    """

    name = "watch"

    def __init__(self) -> None:
        self.waits: list[float] = []
        self.begin = 0.0
        self.content: Any = None

    @hookimpl(wrapper=True)
    def save_checkpoint(self, state: State) -> Generator[None, Any, Any]:
        """Takes the time that the loop waits."""
        self.begin = time.perf_counter()
        path = yield
        self.waits.append(time.perf_counter() - self.begin)
        self.content = state.capture().parts
        return path


def stall(folder: Path, width: int, num_turns: int) -> dict[str, float]:
    """Returns milliseconds: the loop's wait, the whole of a save, and torch.save's."""
    task = tiny_task(
        model=lambda: nn.Sequential(
            nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
        ),
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        eval_dataloaders=None,
        metrics=None,
    )
    watch, wholes, plain, synced = Watch(), [], [], []
    given: dict[str, Any] = {"algorithms": [watch], "checkpoint_keep": 1}
    with isolated_trainer(folder / "stall", task, **given) as trainer:
        trainer.fit()
        for _ in range(num_turns + 1):
            trainer.state.request_checkpoint()
            trainer.fit(until=f"{trainer.state.clock.batch + 1}ba")
            wholes.append(time.perf_counter() - watch.begin)
            begin = time.perf_counter()
            torch.save(watch.content, folder / "plain.pt")
            plain.append(time.perf_counter() - begin)
            with (folder / "plain.pt").open("rb+") as file:
                os.fsync(file.fileno())
            synced.append(time.perf_counter() - begin)
    leaves = tree_leaves(watch.content)
    return {
        "megabytes": sum(one.nbytes for one in leaves if isinstance(one, torch.Tensor)) / 1e6,
        "the loop's wait, ms": _ms(watch.waits),
        "until it is on the disk, ms": _ms(wholes),
        "torch.save, ms": _ms(plain),
        "torch.save and fsync, ms": _ms(synced),
    }


def cost(folder: Path, num_batches: int, num_pairs: int) -> dict[str, float]:
    """Returns the seconds of a turn with and without checkpoints, and their ratio."""
    seconds: dict[str | None, list[float]] = {None: [], "100ba": []}
    for turn in range(num_pairs + 1):
        for interval, times in seconds.items():
            run_dir = folder / f"{turn}-{interval}"
            settings: dict[str, Any] = {"checkpoint_interval": interval, "eval_interval": None}
            settings |= {"max_duration": f"{num_batches}ba", "run_dir": run_dir}
            with isolated_trainer(folder, _charlm(), **settings) as trainer:
                trainer.fit(until="1ba")
                begin = time.perf_counter()
                trainer.fit()
                if turn:
                    times.append(time.perf_counter() - begin)
    without, with_ = (statistics.median(times) for times in seconds.values())
    return {"without, s": without, "every 100 batches, s": with_, "ratio": with_ / without}


def _charlm() -> Any:
    spec = importlib.util.spec_from_file_location("charlm", CHARLM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.task(num_files=20)


def _ms(seconds: list[float]) -> float:
    return 1000 * statistics.median(seconds[1:])  # the first fills memory and caches


if __name__ == "__main__":
    main()
