"""Memory and bytes of each rank of a sharded run: while it builds, trains, saves and resumes.

Several gloo ranks on this machine train a transformer with AdamW under eventloop-fsdp, save, are ended, and go on.
Peak resident memory is the kernel's, from the beginning of each phase on; bytes are those that checkpoints are
read and written with. The wait is what the loop spends in `save_checkpoint`; a save goes on in the background.

    python benchmarks/shards.py [--ranks 4] [--blocks 16] [--width 1024] [--plain] [--json]

With --plain a loop by hand trains the same model under FSDP2, without eventloop.

With PYTHONPATH it measures another version of eventloop.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

VOCABULARY, LENGTH = 256, 16
NUM_BATCHES, SAVED_AT = 4, 2
MEGABYTE = 1e6


def main() -> None:
    """Measures, and writes a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=16, help="of the transformer")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--folder", help="of the run; a temporary one by default")
    parser.add_argument("--json", action="store_true", help="write JSON instead of a table")
    parser.add_argument("--meta", action="store_true", help="no rank builds the model whole")
    parser.add_argument("--plain", action="store_true", help="FSDP2 without eventloop")
    parser.add_argument("--rank", choices=["fresh", "resumed", "plain"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        found = plain(given) if given.rank == "plain" else measured(given)
        print(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as temporary:
        given.folder = given.folder or temporary
        kinds = ("plain",) if given.plain else ("fresh", "resumed")
        runs = {kind: launched(given, kind) for kind in kinds}
    if given.json:
        print(json.dumps(runs, indent=1))
        return
    write_table(given, runs)


def launched(given: argparse.Namespace, kind: str) -> list[dict[str, Any]]:
    """Starts the ranks and returns what each has measured."""
    from torch.distributed import TCPStore

    from eventloop.distributed import rank_variables

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    options = ["--blocks", str(given.blocks), "--width", str(given.width), "--folder", given.folder]
    options += ["--meta"] if given.meta else []
    command = [sys.executable, __file__, "--rank", kind, *options]
    processes = []
    for rank in range(given.ranks):
        variables = os.environ | rank_variables(rank, given.ranks, store.port)
        variables |= {"OMP_NUM_THREADS": "1"}
        processes.append(
            subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)
        )
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("a rank failed")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def measured(given: argparse.Namespace) -> dict[str, Any]:
    """Trains as one rank, and returns what it took."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    from eventloop import Task, Trainer
    from eventloop_fsdp import Fsdp

    num_bytes = count_bytes()
    peaks = Peaks()
    dist.init_process_group("gloo")
    task = Task(
        model=lambda: transformer(given.blocks, given.width),
        loss=lambda logits, targets: torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten()
        ),
        train_dataloader=lambda: DataLoader(
            [(torch.arange(LENGTH) % VOCABULARY, torch.arange(LENGTH) % 7)] * 64, 1
        ),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
    )
    peaks.end("base")
    watch = watching(peaks)
    sharding = [Fsdp(layers=["Block"], meta=given.meta)] if os.environ["WORLD_SIZE"] != "1" else []
    with Trainer(
        task,
        algorithms=[*sharding, watch],
        run_dir=Path(given.folder, "run"),
        device="cpu",
        autoload=False,
        checkpoint_interval=f"{SAVED_AT}ba",
        max_duration=f"{NUM_BATCHES}ba",
    ) as trainer:
        peaks.end("build" if given.rank == "fresh" else "resume")
        if given.rank == "fresh":
            trainer.fit()
    return {
        "peaks": peaks.found,
        "read": num_bytes["read"],
        "written": num_bytes["written"],
        "waits": watch.waits,
        "steps": watch.steps,
        "params": sum(one.numel() for one in trainer.state.model.parameters()),
    }


def plain(given: argparse.Namespace) -> dict[str, Any]:
    """Trains as one rank with FSDP2 alone, and returns what it took."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.functional import cross_entropy

    peaks = Peaks()
    dist.init_process_group("gloo")
    peaks.end("base")
    model = transformer(given.blocks, given.width)
    for block in model[1:-1]:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    peaks.end("build")
    tokens, targets = torch.arange(LENGTH)[None] % VOCABULARY, torch.arange(LENGTH) % 7
    steps = []
    for idx in range(NUM_BATCHES):
        begin = time.perf_counter()
        cross_entropy(model(tokens).flatten(0, 1), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(time.perf_counter() - begin)
        peaks.end("train" if idx else "first step")
    params = sum(one.numel() for one in model.parameters())
    return {"peaks": peaks.found, "steps": steps, "params": params}


def transformer(num_blocks: int, width: int) -> Any:
    """Returns a small language model of blocks with 12 * width ** 2 parameters each."""
    import torch
    from torch import nn

    class Block(nn.Module):
        """Attention and a network, each on what came before."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.again = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            shape = (*hidden.shape[:2], 16, -1)
            q, k, v = (
                one.view(shape).transpose(1, 2) for one in self.qkv(self.norm(hidden)).chunk(3, -1)
            )
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
            return hidden + self.down(nn.functional.gelu(self.up(self.again(hidden))))

    blocks = [Block() for _ in range(num_blocks)]
    return nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks, nn.Linear(width, VOCABULARY))


class Peaks:
    """The peak of this process's resident memory in each phase, in bytes."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def end(self, phase: str) -> None:
        """Notes the peak since the phase before, and begins another."""
        status = Path("/proc/self/status").read_text()
        peak = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert peak is not None
        self.found[phase] = int(peak[1]) * 1024
        Path("/proc/self/clear_refs").write_text("5")


def watching(peaks: Peaks) -> Any:
    """Returns a plugin that ends phases, and times steps and saves."""
    from eventloop import hookimpl

    class Watch:
        name = "watch"

        def __init__(self) -> None:
            self.waits: list[float] = []
            self.steps: list[float] = []
            self._begin = 0.0

        @hookimpl
        def batch_start(self, state: Any) -> None:
            if state.clock.batch == 1:
                peaks.end("first step")
            self._begin = time.perf_counter()

        @hookimpl
        def batch_end(self, state: Any) -> None:
            self.steps.append(time.perf_counter() - self._begin)
            if state.clock.batch == SAVED_AT:
                peaks.end("train")
            if state.clock.batch == NUM_BATCHES:
                peaks.end("save")

        @hookimpl(wrapper=True)
        def save_checkpoint(self, state: Any) -> Any:
            begin = time.perf_counter()
            place = yield
            self.waits.append(time.perf_counter() - begin)
            return place

    return Watch()


def count_bytes() -> Counter[str]:
    """Counts what files are read and written with from now on."""
    counts: Counter[str] = Counter()

    def counted(name: str, kind: str) -> None:
        function = getattr(os, name, None)

        def count(*arguments: Any) -> int:
            num: int = function(*arguments)  # type: ignore[misc]
            counts[kind] += num
            return num

        setattr(os, name, count)

    for name, kind in (("write", "written"), ("readv", "read"), ("preadv", "read")):
        counted(name, kind)
    return counts


def write_table(given: argparse.Namespace, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Writes a line a rank, and what of it is a rank's share."""
    from rich.console import Console
    from rich.table import Table

    first, *others = runs.values()
    num_params = first[0]["params"]
    share = 16 * num_params / given.ranks
    table = Table(title=f"{num_params / MEGABYTE:.0f} million parameters, {given.ranks} ranks, MB")
    phases = ("base", "build", "first step", "train", "save", "resume")
    for name in ("rank", *phases, "written", "read", "wait, s", "step, s"):
        table.add_column(name, justify="right")
    for rank, found in enumerate(first):
        resumed = others[0][rank] if others else {"peaks": {}}
        peaks = {**found["peaks"], "resume": resumed["peaks"].get("resume")}
        numbers = [peaks.get(name) for name in phases]
        numbers += [found.get("written"), resumed.get("read")]
        cells = ["" if one is None else f"{one / MEGABYTE:,.0f}" for one in numbers]
        wait = f"{found['waits'][1]:.2f}" if found.get("waits") else ""
        table.add_row(str(rank), *cells, wait, f"{statistics.median(found['steps']):.2f}")
    console = Console(width=120)
    console.print(table)
    console.print(
        f"a rank's share of parameters, gradients and AdamW's states: {share / MEGABYTE:,.0f} MB; a block: "
        f"{48 * given.width**2 / MEGABYTE:,.0f} MB"
    )


if __name__ == "__main__":
    main()
