"""What Composer's trainer and ours add to a step, beyond a plain loop that does the same work.

The plain loop beside algorithms calls their functions of `composer.functional`, so that what they compute
themselves counts for neither trainer. Interleaved in one process: a run of each in turn, in the processor time of
one thread, so that what else the machine does disturbs them little and alike. The model is a 64-128-10 perceptron
on batches of 64 with SGD and momentum; without progress bars, metrics or loggers.

    python plugins/eventloop-composer/tools/overhead.py [--rounds 15] [--steps 300] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from eventloop_composer import Trainer  # first: it declares what torchvision lacks

import composer  # isort: skip
import composer.functional as functional  # isort: skip
from composer.algorithms import EMA, GradientClipping, LabelSmoothing  # isort: skip
from composer.algorithms.ema.ema import EMAParameters  # isort: skip
from composer.callbacks import LRMonitor, NaNMonitor  # isort: skip
from composer.models import ComposerModel  # isort: skip

Run = Callable[[int], float]
GENERATOR = torch.Generator().manual_seed(0)
WARM_UP = 110  # ours collects garbage at batch 100, for the first time more than it will later
INPUTS = torch.randn(64, 64, generator=GENERATOR)
TARGETS = torch.randint(10, (64,), generator=GENERATOR)


class Perceptron(ComposerModel):
    """What is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, batch: Any) -> Any:
        """Returns logits."""
        return self.layers(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        """Returns the mean loss."""
        return cross_entropy(outputs, batch[1])

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        """Returns none."""
        return {}


class Batches:
    """An epoch of the same batch so many times, which takes the time between two of them.

    Args:
        num_steps: how many are measured, after some that aren't.
    """

    batch_size = 64

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.moments: list[float] = []

    def __len__(self) -> int:
        return WARM_UP + self.num_steps + 1

    def __iter__(self) -> Iterator[Any]:
        for idx in range(len(self)):
            if idx in (WARM_UP, WARM_UP + self.num_steps):
                self.moments.append(time.thread_time())
            yield INPUTS, TARGETS

    def step_us(self) -> float:
        """Returns the microseconds of a step."""
        began, ended = self.moments
        return (ended - began) / self.num_steps * 1e6


def parts() -> tuple[Perceptron, torch.optim.Optimizer]:
    """Returns a model and its optimizer."""
    torch.manual_seed(0)
    model = Perceptron()
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def plain(algorithms: Callable[[], list[Any]] = list, **_: Any) -> Run:
    """Returns a run of a plain loop, with the functions of these algorithms."""
    used = {type(algorithm) for algorithm in algorithms()}
    clips, smooths, averages = (kind in used for kind in (GradientClipping, LabelSmoothing, EMA))

    def run(num_steps: int) -> float:
        model, optimizer = parts()
        average = EMAParameters(model)
        batches = Batches(num_steps)
        for inputs, targets in batches:
            outputs = model((inputs, targets))
            if smooths:
                targets = functional.smooth_labels(outputs, targets)
            loss = model.loss(outputs, (inputs, targets))
            loss.backward()
            if clips:
                functional.apply_gradient_clipping(model, "norm", 1.0, fsdp_enabled=False)
            optimizer.step()
            optimizer.zero_grad()
            if averages:
                functional.compute_ema(model, average, smoothing=0.99)
        return batches.step_us()

    return run


def by(kind: Callable[..., Any], **made: Callable[[], list[Any]]) -> Run:
    """Returns a run of a trainer."""

    def run(num_steps: int) -> float:
        model, optimizer = parts()
        batches = Batches(num_steps)
        trainer = kind(
            model=model,
            optimizers=optimizer,
            train_dataloader=batches,
            max_duration="1ep",
            progress_bar=False,
            device="cpu",
            seed=1,
            **{name: make() for name, make in made.items()},
        )
        trainer.fit()
        trainer.close()
        return batches.step_us()

    return run


def ours(**given: Any) -> Trainer:
    """Returns our trainer, without the plugins that happen to be installed."""
    return Trainer(settings={"autoload": False}, **given)


SETS: dict[str, dict[str, Callable[[], list[Any]]]] = {
    "a model alone": {},
    "two callbacks": {"callbacks": lambda: [LRMonitor(), NaNMonitor()]},
    "an algorithm": {"algorithms": lambda: [GradientClipping("norm", 1.0)]},
    "three algorithms": {
        "algorithms": lambda: [GradientClipping("norm", 1.0), LabelSmoothing(), EMA("100ba")]
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    runs: dict[tuple[str, str], Run] = {}
    for name, made in SETS.items():
        runs[name, "plain"] = plain(**made)
        runs[name, "Composer's"] = by(composer.Trainer, **made)
        runs[name, "ours"] = by(ours, **made)
    spent: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for _ in range(given.rounds):
        for key, run in runs.items():
            spent[key].append(run(given.steps))
    lines = []
    for name in SETS:
        base = spent[name, "plain"]
        theirs, here = (
            statistics.median(
                one - other for one, other in zip(spent[name, which], base, strict=True)
            )
            for which in ("Composer's", "ours")
        )
        plain_us = statistics.median(base)
        lines.append({"name": name, "plain_us": plain_us, "theirs_us": theirs, "ours_us": here})
    if given.json:
        print(json.dumps(lines, indent=1))
        return
    for one in lines:
        print(
            f"{one['name']}: plain loop {one['plain_us']:.0f} us, Composer's trainer adds "
            f"{one['theirs_us']:.0f} us, ours {one['ours_us']:.0f} us: "
            f"{one['ours_us'] / one['theirs_us']:.0%}"
        )


if __name__ == "__main__":
    main()
