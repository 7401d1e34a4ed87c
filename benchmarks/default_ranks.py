"""Several ranks as users run them by default, beside the loops that they would write with DDP and FSDP2.

    python benchmarks/default_ranks.py [--ranks 2] [--epochs 12] [--only ROW] [--json]

Real gloo processes on this machine, each with one thread. In every rank an epoch by hand and one by
`Trainer.fit` take turns, over the same kind of data loader; a row has the median of the ratios of neighbours. A
model of width 64 makes small steps, one of width 1,024 larger ones. With `lightning` installed, its epochs take
turns, too.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchmetrics.classification import MulticlassAccuracy

from eventloop import Task, Trainer, hookimpl
from eventloop.distributed import join_processes
from eventloop_testing import run_ranks

BATCH_SIZE, NUM_CLASSES = 64, 10
Train = Callable[[int], None]


class Row(NamedTuple):
    """What is trained, and how."""

    width: int
    sharded: bool = False
    microbatches: int = 1
    bf16: bool = False
    clips: bool = False
    logs: bool = False  # a metric and a number in each step
    num_batches: int = 100


ROWS = {
    "DDP, 64 wide": Row(64, num_batches=600),
    "DDP, 64 wide, fits of one batch": Row(64, num_batches=1),
    "DDP, 64 wide, 4 microbatches": Row(64, microbatches=4, num_batches=600),
    "DDP, 64 wide, clipping, a metric, a number a step": Row(
        64, clips=True, logs=True, num_batches=600
    ),
    "DDP, 256 wide": Row(256, num_batches=400),
    "DDP, 1,024 wide": Row(1024),
    "DDP, 1,024 wide, 4 microbatches": Row(1024, microbatches=4, num_batches=50),
    "DDP, 1,024 wide, bf16": Row(1024, bf16=True),
    "DDP, 1,024 wide, clipping, a metric, a number a step": Row(1024, clips=True, logs=True),
    "FSDP2, 1,024 wide": Row(1024, sharded=True),
    "FSDP2, 1,024 wide, 4 microbatches": Row(1024, True, 4, num_batches=50),
}


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Samples in memory, read one by one, that draw nothing."""

    def __init__(self, row: Row, num_ranks: int) -> None:
        generator = torch.Generator().manual_seed(0)
        num = row.num_batches * BATCH_SIZE * num_ranks
        self.inputs = torch.randn(num, row.width, generator=generator)
        self.targets = torch.randint(NUM_CLASSES, (num,), generator=generator)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, idx: int) -> tuple[Tensor, Tensor]:
        return self.inputs[idx], self.targets[idx]


def network(width: int) -> nn.Module:
    """Makes a perceptron of two blocks."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(2))
    return nn.Sequential(*blocks, nn.Linear(width, NUM_CLASSES))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Makes its optimizer."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def by_hand(row: Row, samples: Samples) -> Train:
    """Returns what trains for an epoch with PyTorch alone."""
    model = network(row.width)
    if row.sharded:
        from torch.distributed.fsdp import fully_shard

        for block in model.children():
            fully_shard(block)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer, accuracy = optimizer_of(model), MulticlassAccuracy(NUM_CLASSES)
    sampler = DistributedSampler(samples)
    loader = DataLoader(samples, BATCH_SIZE, sampler=sampler)
    numbers: list[Tensor] = []

    def backward(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=row.bf16):
            outputs = model(inputs)
            loss = cross_entropy(outputs, targets)
        (loss / row.microbatches).backward()
        if row.logs:
            accuracy.update(outputs.detach(), targets)
        return loss.detach()

    def train(epoch: int) -> None:
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            parts = [
                *zip(inputs.chunk(row.microbatches), targets.chunk(row.microbatches), strict=True)
            ]
            for idx, part in enumerate(parts):
                is_last = idx == len(parts) - 1
                if row.sharded:
                    model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
                with contextlib.nullcontext() if is_last or row.sharded else model.no_sync():  # type: ignore[operator]
                    numbers.append(backward(*part))
            if row.clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            del numbers[:-10]
        accuracy.reset()

    return train


class Logs:
    """Logs a number in each step."""

    @hookimpl
    def after_loss(self, state: Any) -> None:
        state.log("train/number", state.loss.detach())


def fitted(row: Row, samples: Samples, folder: str) -> Train:
    """Returns what has a trainer train for an epoch; without checkpoints."""
    algorithms: list[object] = [Logs()] * row.logs
    if row.sharded:
        from eventloop_fsdp import Fsdp

        algorithms.append(Fsdp(layers=["Sequential"]))
    task = Task(
        model=lambda: network(row.width),
        loss=cross_entropy,
        train_dataloader=DataLoader(samples, BATCH_SIZE, shuffle=True),
        optimizer=optimizer_of,
        metrics={"accuracy": MulticlassAccuracy(NUM_CLASSES)} if row.logs else {},
    )
    trainer = Trainer(
        task,
        algorithms=algorithms,
        max_duration="1000ep",
        precision="bf16" if row.bf16 else "fp32",
        clip_norm=1.0 if row.clips else None,
        microbatch_size=BATCH_SIZE // row.microbatches if row.microbatches > 1 else None,
        device="cpu",
        run_dir=folder,
        checkpoint_interval=None,
        autoload=False,
    )
    return lambda epoch: trainer.fit(until=f"{epoch + 1}ep") and None


def with_lightning(row: Row, samples: Samples) -> Train:
    """Returns what has Lightning's trainer train for an epoch, on the ranks that are there."""
    import lightning
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    logging.getLogger("lightning").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = network(row.width)
            self.accuracy = MulticlassAccuracy(NUM_CLASSES)

        def training_step(self, batch: Any, _: int) -> Tensor:
            outputs = self.model(batch[0])
            loss = cross_entropy(outputs, batch[1])
            if row.logs:
                self.accuracy.update(outputs.detach(), batch[1])
                self.log("number", loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self)

    module = Module()
    loader = DataLoader(samples, BATCH_SIZE, shuffle=True)

    def train(_: int) -> None:
        trainer = lightning.Trainer(
            accelerator="cpu",
            strategy="ddp",
            devices=int(os.environ["LOCAL_WORLD_SIZE"]),
            plugins=[TorchElasticEnvironment()],
            max_epochs=1,
            precision="bf16-mixed" if row.bf16 else "32-true",
            gradient_clip_val=1.0 if row.clips else None,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader)

    return train


def measure(name: str, num_epochs: int, folder: str) -> dict[str, Any]:
    """Lets the loops of a row take turns, on this rank.

    Args:
        folder: where the run's files go; of all ranks, as shards need it.

    Returns:
        Its name, the median time of a step by hand in ms, and the time of the others' steps over it.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    row, processes = ROWS[name], join_processes()
    samples = Samples(row, processes.world_size)
    with contextlib.redirect_stderr(io.StringIO()):
        loops = {"hand": by_hand(row, samples), "eventloop": fitted(row, samples, folder + "/run")}
        if find_spec("lightning") and not row.sharded and row.microbatches == 1:
            loops["lightning"] = with_lightning(row, samples)
        times: dict[str, list[float]] = {one: [] for one in loops}
        for epoch in range(num_epochs + 1):
            for one, train in loops.items():
                dist.barrier()
                begin = time.perf_counter()
                train(epoch)
                times[one].append(time.perf_counter() - begin)
    hand = times["hand"][1:]  # the first epoch imports and compiles what is left
    found = {
        one: statistics.median(b / a for a, b in zip(hand, times[one][1:], strict=True))
        for one in loops
        if one != "hand"
    }
    return {"row": name, "hand_ms": statistics.median(hand) / row.num_batches * 1e3, **found}


def main() -> None:
    """Prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--only", choices=ROWS, help="one row")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = []
    for name in [given.only] if given.only else ROWS:
        with tempfile.TemporaryDirectory() as folder:
            ranks = run_ranks(
                measure, name, given.epochs, folder, world_size=given.ranks, timeout_s=1200
            )
        rows.append(ranks[0])
        print(rows[-1], file=sys.stderr)
    if given.json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(f"{given.ranks} ranks", "by hand, ms a step", "eventloop", "Lightning")
    for row in rows:
        others = (f"{row[one]:.2f}" if one in row else "" for one in ("eventloop", "lightning"))
        table.add_row(row["row"], f"{row['hand_ms']:.2f}", *others)
    Console().print(table)


if __name__ == "__main__":
    main()
