"""Seeded samples: what it costs to tie a data set's draws to seed, epoch and index.

The same data loader is gone through with its draws left alone (`seed_samples=False`), seeded, and
seeded as one would without thinking (`seed_everything` for each sample). The three take turns in
one run, in one thread and without workers, where it costs most; medians are compared. Two data
sets draw: one whose samples are three random numbers, and one of images that are cropped and flipped at
random. A data set that draws nothing, and a TensorDataset, which is known not to, show what those pay who
don't need it.

    python benchmarks/seeded_samples.py [--turns 30] [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from eventloop.data.feed import Feed
from eventloop.distributed.processes import Processes
from eventloop.rng import kept_generators, seed_everything

NUM_SAMPLES, BATCH_SIZE = 2048, 64


class Numbers(Dataset[list[float]]):
    """A number of each generator, and nothing else."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, idx: int) -> list[float]:
        return [random.random(), np.random.rand(), torch.rand(()).item()]


class Images(Dataset[Tensor]):
    """Images of 3 x 32 x 32, padded, cropped and flipped at random, and normalised."""

    def __init__(self) -> None:
        self.pixels = torch.randint(256, (NUM_SAMPLES, 3, 40, 40), dtype=torch.uint8)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, idx: int) -> Tensor:
        top, left = random.randrange(9), random.randrange(9)
        image = self.pixels[idx, :, top : top + 32, left : left + 32].float() / 255
        image = (image - 0.5) / 0.25
        return image.flip(2) if torch.rand(()) < 0.5 else image


class Plain(Dataset[Tensor]):
    """Images that are there as they are trained on."""

    def __init__(self) -> None:
        self.pixels = torch.rand(NUM_SAMPLES, 3, 32, 32)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, idx: int) -> Tensor:
        return self.pixels[idx]


class Naive(Dataset[Any]):
    """Seeds everything before each sample, and puts it back afterwards."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, idx: int) -> Any:
        with kept_generators():
            seed_everything(hash((0, 0, idx)) % 2**32)
            return self.dataset[idx]


DATASETS = {
    "three numbers": Numbers,
    "images": Images,
    "plain images": Plain,
    "tensors": lambda: TensorDataset(torch.rand(NUM_SAMPLES, 3, 32, 32)),
}


def turn(dataset: Any, sample_seed: int | None) -> float:
    """Goes through the data once; gives the seconds of processor time that it took."""
    feed = Feed(DataLoader(dataset, BATCH_SIZE), Processes(), sample_seed=sample_seed)
    feed.start_epoch(0)
    start = time.process_time()
    while feed.has_next():
        feed.next()
    return time.process_time() - start


def measure(name: str, num_turns: int) -> dict[str, float]:
    """Returns microseconds a sample: alone, and what each way of seeding adds."""
    dataset = DATASETS[name]()
    seconds: dict[str, list[float]] = {"alone": [], "seeded": [], "naive": []}
    for _ in range(num_turns):
        seconds["alone"].append(turn(dataset, None))
        seconds["seeded"].append(turn(dataset, 0))
        seconds["naive"].append(turn(Naive(dataset), None))
    us = {way: statistics.median(found) / NUM_SAMPLES * 1e6 for way, found in seconds.items()}
    return {
        "alone, us": us["alone"],
        "seeding adds, us": us["seeded"] - us["alone"],
        "ratio": us["seeded"] / us["alone"],
        "naive seeding adds, us": us["naive"] - us["alone"],
    }


def main() -> None:
    """Measures and writes a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = {name: measure(name, arguments.turns) for name in DATASETS}
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    table = Table("a sample of", *rows["images"])
    for name, row in rows.items():
        table.add_row(name, *(f"{value:.2f}" for value in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
