"""Host time of a LightningModule: what a step costs under Lightning's own trainer and under ours.

Beside both, the same module in a plain loop; what a trainer adds to it is its overhead. All are
interleaved in one process, round by round, in the processor time of one thread, so that what else the
machine does disturbs them little and alike. Calls are counted beside it, which nothing disturbs.
Needs `lightning`, and `eventloop-lightning` where Python finds it.

    python benchmarks/bridge_lightning.py [--rounds 9] [--steps 1000] [--json]
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import eventloop_lightning

BATCH = 64
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "max_epochs": 1,
}


class Steps:
    """A data loader of one batch, again and again.

    Args:
        num: how often.
    """

    def __init__(self, num: int) -> None:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(BATCH, 64, generator=generator)
        self._batch = inputs, torch.randint(10, (BATCH,), generator=generator)
        self._num = num

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Any]:
        return (self._batch for _ in range(self._num))


class Perceptron(pl.LightningModule):
    """Takes the time from the first step to the last.

    Args:
        num_logs: how many numbers a step logs.
    """

    def __init__(self, num_logs: int = 0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.names = [f"number_{idx}" for idx in range(num_logs)]
        self.clock = Stopwatch()

    def on_train_start(self) -> None:
        self.clock.start()

    def on_train_end(self) -> None:
        self.clock.stop()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = cross_entropy(self.net(batch[0]), batch[1])
        for name in self.names:
            self.log(name, loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-3, momentum=0.9)


class ByHand(Perceptron):
    """The same with manual optimization."""

    def __init__(self, num_logs: int = 0) -> None:
        super().__init__(num_logs)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Stopwatch:
    """Takes processor time, or counts calls, of one thread."""

    counts = False

    def start(self) -> None:
        self.calls, self.since = 0, time.thread_time()
        if self.counts:
            sys.setprofile(self._count)

    def stop(self) -> None:
        sys.setprofile(None)
        self.seconds = time.thread_time() - self.since

    def _count(self, frame: Any, event: str, arg: Any) -> None:
        self.calls += event in ("call", "c_call")


@dataclass(frozen=True)
class Row:
    """A line of the table: what is added to a plain step, in microseconds and in calls."""

    name: str
    plain_us: float
    theirs_us: float
    ours_us: float
    theirs_calls: float
    ours_calls: float

    @property
    def ratio(self) -> float:
        """Our overhead as a part of Lightning's."""
        return self.ours_us / self.theirs_us


def plain_loop(module: Perceptron, num_steps: int) -> Stopwatch:
    """Trains without a trainer, and without logging."""
    optimizer = torch.optim.SGD(module.parameters(), 1e-3, momentum=0.9)
    module.clock.start()
    for inputs, targets in Steps(num_steps):
        loss = cross_entropy(module.net(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    module.clock.stop()
    return module.clock


def under(trainer: Callable[..., Any], module: Perceptron, num_steps: int) -> Stopwatch:
    """Trains with one of the trainers."""
    trainer(**QUIET).fit(module, Steps(num_steps))
    return module.clock


def ours(**arguments: Any) -> Any:
    """Returns our trainer, without the plugins that happen to be installed."""
    return eventloop_lightning.Trainer(settings={"autoload": False}, **arguments)


def measured(name: str, make: Callable[[], Perceptron], rounds: int, num_steps: int) -> Row:
    """Measures one kind of module."""
    runs: list[Callable[[Perceptron, int], Stopwatch]] = [
        plain_loop,
        lambda module, num: under(pl.Trainer, module, num),
        lambda module, num: under(ours, module, num),
    ]
    times: list[list[float]] = [[], [], []]
    for _ in range(rounds):
        for found, run in zip(times, runs, strict=True):
            found.append(run(make(), num_steps).seconds / num_steps * 1e6)
    Stopwatch.counts = True
    calls = [run(make(), 200).calls / 200 for run in runs]
    Stopwatch.counts = False
    plain = times[0]
    theirs = statistics.median(one - base for one, base in zip(times[1], plain, strict=True))
    mine = statistics.median(one - base for one, base in zip(times[2], plain, strict=True))
    base = statistics.median(plain)
    return Row(name, base, theirs, mine, calls[1] - calls[0], calls[2] - calls[0])


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    kinds = {
        "automatic": Perceptron,
        "automatic, 1 number logged": lambda: Perceptron(1),
        "automatic, 5 numbers logged": lambda: Perceptron(5),
        "manual": ByHand,
    }
    rows = [measured(name, make, given.rounds, given.steps) for name, make in kinds.items()]
    if given.json:
        print(json.dumps([{**vars(one), "ratio": one.ratio} for one in rows], indent=1))
        return
    print(f"{'':30}{'plain':>9}{'Lightning':>11}{'ours':>9}{'ratio':>7}   calls: Lightning, ours")
    for one in rows:
        times = f"{one.plain_us:7.0f}us{one.theirs_us:9.0f}us{one.ours_us:7.0f}us{one.ratio:7.2f}"
        print(f"{one.name:30}{times}   {one.theirs_calls:.0f}, {one.ours_calls:.0f}")


if __name__ == "__main__":
    main()
