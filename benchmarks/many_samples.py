"""A data set of 100 million samples that are made on request: memory of order and state, and a resume in the middle.

Each kind in a process of its own: it takes the first batch of an epoch, then a new feed goes on behind half of
the samples, as a checkpoint of that moment has it. No sample is read for that but those of the next batch.

    python benchmarks/many_samples.py [--samples 100_000_000] [--ranks 2] [--json]

With ranks, the numbers are those of the rank that needs most.
"""

from __future__ import annotations

import argparse
import io
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from eventloop.data.feed import Feed
from eventloop.distributed import join_processes
from eventloop.distributed.processes import Processes
from eventloop_streaming import Batches, Permuted, Shards, Shuffled
from eventloop_testing import run_ranks

BATCH_SIZE, NUM_SHARDS, BUFFER = 1_000, 10_000, 10_000


class OnRequest(Dataset[Tensor]):
    """Samples that are computed from their index."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, idx: int) -> Tensor:
        return torch.tensor(idx) * 2


def shuffled(num: int) -> Any:
    return DataLoader(OnRequest(num), BATCH_SIZE, shuffle=True)


def permuted(num: int) -> Any:
    return DataLoader(OnRequest(num), BATCH_SIZE, sampler=Permuted(num))


def streamed(num: int) -> Any:
    size = num // NUM_SHARDS

    def read(shard: int) -> Iterator[int]:
        return iter(range(shard * size, (shard + 1) * size))

    return Batches(Shuffled(Shards(range(NUM_SHARDS), read), BUFFER), BATCH_SIZE)


KINDS = {
    "DataLoader(shuffle=True)": shuffled,
    "DataLoader(sampler=Permuted)": permuted,
    "Batches(Shuffled(Shards))": streamed,
}


def at_half(state: dict[str, Any], num: int, world_size: int) -> dict[str, Any]:
    """Returns the state of a feed as it is when half of the epoch was taken."""
    state["num_taken"] = num // 2 // BATCH_SIZE // world_size
    if state["kind"] == "stateful":
        source = state["position"]["dataloader"]["own"]["source"]
        source["num_read"] = num // 2 // world_size
        source["own"].update(num_shards=NUM_SHARDS // 2 // world_size, num_samples=0)
    else:
        state["position"]["check"] = None  # of the order so far: half of it wasn't drawn
    return state


def feed_of(kind: str, num: int, processes: Processes) -> Feed:
    torch.manual_seed(0)
    return Feed(KINDS[kind](num), processes, sample_seed=0)


def measured(kind: str, num: int) -> dict[str, float]:
    processes = join_processes()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    first = feed_of(kind, num, processes)
    start = time.perf_counter()
    first.start_epoch(0)
    assert first.has_next()
    first.next()
    first_s = time.perf_counter() - start
    state, file = at_half(first.state_dict(), num, processes.world_size), io.BytesIO()
    torch.save(state, file)
    del first
    second = feed_of(kind, num, processes)
    start = time.perf_counter()
    second.load_state_dict(state)
    assert second.has_next()
    assert len(second.next()) == BATCH_SIZE
    resume_s = time.perf_counter() - start
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "memory_mb": (most - before) * 1024 / 1e6,
        "state_kb": file.tell() / 1e3,
        "first_s": first_s,
        "resume_s": resume_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=100_000_000)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        args = given.one, given.samples
        ranks = (
            [measured(*args)]
            if given.ranks == 1
            else run_ranks(measured, *args, world_size=given.ranks, timeout_s=3_600)
        )
        print(json.dumps({name: max(one[name] for one in ranks) for name in ranks[0]}))
        return
    rows = {}
    for kind in KINDS:
        command = [sys.executable, __file__, "--one", kind, "--samples", str(given.samples)]
        command += ["--ranks", str(given.ranks)]
        rows[kind] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    if given.json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(
        title=f"{given.samples:,} samples, batches of {BATCH_SIZE:,}, ranks: {given.ranks}"
    )
    for column in ("data", "memory, MB", "state, kB", "first batch, s", "resume at half, s"):
        table.add_column(column)
    for kind, row in rows.items():
        numbers = (row["memory_mb"], row["state_kb"], row["first_s"], row["resume_s"])
        table.add_row(kind, *(f"{one:,.1f}" for one in numbers))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
