"""What users run by default, beside the loop that they would write by hand with the same data loader.

    python benchmarks/default_run.py [--epochs 15] [--cpu] [--json]

Rows are kinds of data: a data set of one's own that draws nothing, one that draws, with 0 and 2 workers,
and a TensorDataset. A perceptron is trained on batches of 64 samples, in one thread. An epoch by hand and
one by `Trainer.fit` take turns; a row has the median of the ratios of neighbours, which a busy machine
disturbs less than the times. `unseeded` is `fit` with `seed_samples=False`. Every `fit` begins anew where
it stopped, as in a notebook, so that what it does at its start is a part of each epoch.

A second table has the README's example, `examples/digits.py`, for 8 epochs: by hand with the same data
loaders, learning rates, metric and an evaluation after each epoch, and by `Trainer.fit` without and with a
run folder, in turns. Neither what builds the model nor what builds the `Trainer` is in its times.

`--cpu` compares processor time instead, that of all threads, which other programs on the machine disturb
less; rows with workers, whose time it doesn't know, are left out.
"""

from __future__ import annotations

import argparse
import json
import runpy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from eventloop import Task, Trainer

BATCH_SIZE, WIDTH = 64, 64
READ_S = 100e-6
DIGITS = runpy.run_path(str(Path(__file__).parents[1] / "examples/digits.py"))
NUM_EPOCHS = 8  # of the digits


class Own(Dataset[tuple[Tensor, Tensor]]):
    """Samples in memory, read one by one."""

    def __init__(self, num_batches: int) -> None:
        self.inputs = torch.randn(num_batches * BATCH_SIZE, WIDTH)
        self.targets = torch.randint(10, (len(self.inputs),))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, idx: int) -> tuple[Tensor, Tensor]:
        return self.inputs[idx], self.targets[idx]


class Noisy(Own):
    """Samples that take as long as the decoding of a small image, with noise."""

    def __getitem__(self, idx: int) -> tuple[Tensor, Tensor]:
        end = time.perf_counter() + READ_S
        inputs = self.inputs[idx] + 0.1 * torch.randn(WIDTH)
        while time.perf_counter() < end:
            pass
        return inputs, self.targets[idx]


def in_memory(num_batches: int) -> TensorDataset:
    """Makes the same samples, known to torch."""
    own = Own(num_batches)
    return TensorDataset(own.inputs, own.targets)


# The data set, its batches in an epoch, and the workers.
ROWS: dict[str, tuple[Callable[[int], Any], int, int]] = {
    "own data set, draws nothing": (Own, 1000, 0),
    "the same, 2 workers": (Own, 1000, 2),
    "draws, 100 us a sample": (Noisy, 150, 0),
    "the same, with 2 workers": (Noisy, 150, 2),
    "TensorDataset": (in_memory, 1000, 0),
}


def network() -> nn.Module:
    """Makes the perceptron."""
    return nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, 10))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Makes its optimizer."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def by_hand(loader: DataLoader[Any]) -> Callable[[int], None]:
    """Returns what trains for an epoch, as the beginning of torch's tutorial does."""
    model = network()
    optimizer = optimizer_of(model)

    def train(_: int) -> None:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()

    return train


def fitted(loader: DataLoader[Any], *, seeded: bool) -> Callable[[int], None]:
    """Returns what has a trainer, with all that is on by default, train for an epoch."""
    task = Task(model=network, loss=cross_entropy, train_dataloader=loader, optimizer=optimizer_of)
    trainer = Trainer(task, max_duration="1000ep", seed_samples=seeded, autoload=False)
    return lambda epoch: trainer.fit(until=f"{epoch + 1}ep")


def measure(name: str, num_epochs: int, now: Callable[[], float]) -> dict[str, Any]:
    """Lets the loops of a row take turns.

    Args:
        now: the clock.

    Returns:
        Its name, the median time of a step by hand in us, and the samples per second of the others
        relative to it.
    """
    make, num_batches, num_workers = ROWS[name]
    loader = DataLoader(make(num_batches), BATCH_SIZE, shuffle=True, num_workers=num_workers)
    loops = {
        "hand": by_hand(loader),
        "eventloop": fitted(loader, seeded=True),
        "unseeded": fitted(loader, seeded=False),
    }
    times: dict[str, list[float]] = {one: [] for one in loops}
    for epoch in range(num_epochs + 1):
        for one, train in loops.items():
            begin = now()
            train(epoch)
            times[one].append(now() - begin)
    hand = times["hand"][1:]  # the first epoch imports and compiles what is left
    rates = {
        one: statistics.median(a / b for a, b in zip(hand, times[one][1:], strict=True))
        for one in ("eventloop", "unseeded")
    }
    return {"data": name, "hand_us": statistics.median(hand) / num_batches * 1e6, **rates}


def digits_by_hand(now: Callable[[], float]) -> float:
    """Trains the example for its epochs with a plain loop; returns the seconds that took."""
    task = DIGITS["task"]()
    model = DIGITS["make_model"](32)
    loader, test = task.train_dataloader, task.eval_dataloaders["test"]
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_EPOCHS * len(loader))
    accuracy = MulticlassAccuracy(10, average="micro")
    begin = now()
    for _ in range(NUM_EPOCHS):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()
        accuracy.reset()
        total = torch.zeros(())
        with torch.no_grad():
            for images, labels in test:
                logits = model(images)
                accuracy.update(logits, labels)
                total += cross_entropy(logits, labels) * len(labels)
        accuracy.compute().item(), total.item()
    return now() - begin


def digits_fitted(now: Callable[[], float], *, has_folder: bool) -> float:
    """Trains it with a trainer and all that is on by default."""
    with tempfile.TemporaryDirectory() as folder:
        place = {"run_dir": f"{folder}/run"} if has_folder else {}
        trainer = Trainer(DIGITS["task"](), max_duration=f"{NUM_EPOCHS}ep", autoload=False, **place)
        begin = now()
        trainer.fit()
        seconds = now() - begin
        trainer.close()
    return seconds


def measure_digits(num_turns: int, now: Callable[[], float]) -> dict[str, float]:
    """Lets the ways of training the example take turns.

    Args:
        now: the clock.

    Returns:
        The median time by hand in seconds, and the times of the others relative to it.
    """
    ways = {
        "hand": lambda: digits_by_hand(now),
        "fit": lambda: digits_fitted(now, has_folder=False),
        "fit, run folder": lambda: digits_fitted(now, has_folder=True),
    }
    turns = [{name: train() for name, train in ways.items()} for _ in range(num_turns + 1)][1:]
    return {
        "hand_s": statistics.median(one["hand"] for one in turns),
        **{
            name: statistics.median(one[name] / one["hand"] for one in turns)
            for name in ("fit", "fit, run folder")
        },
    }


def main() -> None:
    """Prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--only", choices=[*ROWS, "digits"], help="one row")
    parser.add_argument("--cpu", action="store_true", help="processor time")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    now = time.process_time if given.cpu else time.perf_counter
    names = [name for name, (*_, num_workers) in ROWS.items() if not (given.cpu and num_workers)]
    rows = [measure(name, given.epochs, now) for name in names if given.only in (None, name)]
    digits = measure_digits(given.epochs, now) if given.only in (None, "digits") else {}
    if given.json:
        print(json.dumps({"rows": rows, "digits": digits}, indent=1))
        return
    table = Table("data", "by hand, us a step", "eventloop", "unseeded")
    for row in rows:
        rates = (f"{row[one]:.2f}" for one in ("eventloop", "unseeded"))
        table.add_row(row["data"], f"{row['hand_us']:.0f}", *rates)
    console = Console()
    if rows:
        console.print(table)
    if digits:
        table = Table("examples/digits.py", "time, relative to the loop by hand")
        table.add_row("by hand", f"{digits['hand_s']:.2f} s")
        for name in ("fit", "fit, run folder"):
            table.add_row(name, f"{digits[name]:.2f}")
        console.print(table)


if __name__ == "__main__":
    main()
