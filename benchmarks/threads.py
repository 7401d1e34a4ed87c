"""Threads and worker processes that read samples: throughput, memory and the first batch.

Each data loader reads the same data set in a process of its own, with as many workers or threads as there
are cores: JPEGs that Pillow decodes, crops and resizes, and arrays that NumPy makes floats of. Memory is
what the process and its workers hold at most (PSS: shared pages count once). spdl, where it is
installed, gets the same function, and its order is that of its source.

    python benchmarks/threads.py [--workers 2] [--batches 60] [--repeats 3] [--json]
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

BATCH_SIZE, NUM_FILES, SIDE = 32, 64, 224


class Jpegs(Dataset[Tensor]):
    """JPEGs in memory, of 500 by 375 pixels, cropped at random and resized to 224 by 224."""

    def __init__(self, num: int) -> None:
        from PIL import Image

        self.num, self.files = num, []
        self.rng = np.random.default_rng(0)
        for seed in range(NUM_FILES):
            small = np.random.default_rng(seed).integers(0, 255, (24, 32, 3), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(small).resize((500, 375)).save(file, "JPEG", quality=90)
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, idx: int) -> Tensor:
        from PIL import Image

        left, upper = self.rng.integers(0, 100, 2)
        image = Image.open(io.BytesIO(self.files[idx % NUM_FILES])).convert("RGB")
        box = (int(left), int(upper), int(left) + 256, int(upper) + 256)
        pixels = np.asarray(image.resize((SIDE, SIDE), box=box))
        return torch.from_numpy(pixels.transpose(2, 0, 1).astype(np.float32) / 255)


class Arrays(Dataset[Tensor]):
    """Arrays in memory, 3 by 224 by 224 bytes each, that become floats, and are scaled."""

    def __init__(self, num: int) -> None:
        self.num = num
        rng = np.random.default_rng(0)
        self.arrays = rng.integers(0, 255, (NUM_FILES, 3, SIDE, SIDE), dtype=np.uint8)

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, idx: int) -> Tensor:
        array = self.arrays[idx % NUM_FILES].astype(np.float32)
        return torch.from_numpy((array - array.mean()) / array.std())


def by_process(data: Any, num_workers: int) -> Iterable[Any]:
    return DataLoader(data, BATCH_SIZE)


def by_workers(data: Any, num_workers: int) -> Iterable[Any]:
    return DataLoader(data, BATCH_SIZE, num_workers=num_workers)


def by_threads(data: Any, num_workers: int) -> Iterable[Any]:
    from eventloop_streaming import ThreadedDataLoader

    return ThreadedDataLoader(data, BATCH_SIZE, num_workers=num_workers)


def by_spdl(data: Any, num_workers: int) -> Iterable[Any]:
    import spdl.dataloader

    return spdl.dataloader.DataLoader(
        range(len(data)), preprocessor=data.__getitem__, batch_size=BATCH_SIZE,
        aggregator=default_collate, num_threads=num_workers, buffer_size=2 * num_workers,
        output_order="input",
    )  # fmt: skip


DATA = {"JPEGs": Jpegs, "arrays": Arrays}
LOADERS = {
    "no workers": by_process,
    "worker processes": by_workers,
    "threads": by_threads,
    "spdl": by_spdl,
}


class Memory(threading.Thread):
    """Looks ten times a second at what this process and its children hold."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most_mib, self.is_over = 0.0, threading.Event()

    def run(self) -> None:
        while not self.is_over.wait(0.1):
            self.most_mib = max(self.most_mib, sum(map(_pss_mib, [os.getpid(), *_children()])))


def _children() -> list[int]:
    found = []
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        try:
            found += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found


def _cpu_s() -> float:
    """Returns the processor time of this process and of the workers that have ended."""
    own, workers = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + workers.ru_utime + workers.ru_stime


def _pss_mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(one.split()[1]) for one in lines if one.startswith("Pss:")) / 1024


def measured(data: str, loader: str, num_workers: int, num_batches: int) -> dict[str, float]:
    """Returns the numbers of one data loader; in a process of its own."""
    torch.set_num_threads(1)
    dataset = DATA[data](BATCH_SIZE * num_batches)
    before_mib = _pss_mib(os.getpid())
    memory = Memory()
    memory.start()
    start = time.perf_counter()
    cpu_s = _cpu_s()
    batches = iter(LOADERS[loader](dataset, num_workers))
    next(batches)
    first_s = time.perf_counter() - start
    num = sum(len(batch) for batch in batches)
    rest_s = time.perf_counter() - start - first_s
    del batches  # its workers are waited for
    memory.is_over.set()
    memory.join()
    return {
        "samples_per_s": num / rest_s,
        "cpu_ms": 1e3 * (_cpu_s() - cpu_s) / len(dataset),
        "memory_mib": memory.most_mib - before_mib,
        "first_batch_s": first_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measured(*given.one, given.workers, given.batches)))
        return
    rows: dict[str, dict[str, Any]] = {}
    installed = [one for one in LOADERS if one != "spdl" or importlib.util.find_spec("spdl")]
    for _ in range(given.repeats):  # in turns: other work on the machine hits all alike
        for data in DATA:
            for loader in installed:
                command = [sys.executable, __file__, "--one", data, loader]
                command += ["--workers", str(given.workers), "--batches", str(given.batches)]
                found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
                for name, value in found.items():
                    rows.setdefault(f"{data}, {loader}", {}).setdefault(name, []).append(value)
    medians = {
        name: {what: statistics.median(values) for what, values in row.items()}
        for name, row in rows.items()
    }
    if given.json:
        print(json.dumps(medians, indent=2))
        return
    table = Table(title=f"{given.workers} workers or threads, batches of {BATCH_SIZE}")
    for column in (
        "data, loader",
        "samples a second",
        "CPU ms a sample",
        "memory, MiB",
        "first batch, s",
    ):
        table.add_column(column)
    for name, row in medians.items():
        table.add_row(
            name, f"{row['samples_per_s']:,.0f}", f"{row['cpu_ms']:.2f}", f"{row['memory_mib']:,.0f}",
            f"{row['first_batch_s']:.2f}",
        )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
