"""Host time: what eventloop adds to a step, against a plain loop that does the same work.

Both train a 64-128-10 perceptron on batches of 64 with SGD and momentum, in one thread. All
variants are interleaved in one run, a thousand steps of each in turn, and compared round by round,
so that a noisy machine disturbs them alike; the noise floor is the same measurement of the plain
loop against itself. Calls are counted beside it, which no noise touches.

    python benchmarks/host_time.py [--rounds 40] [--steps 1000] [--plugins 200] [--json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassAccuracy

from eventloop import Task, Trainer, hookimpl
from eventloop.events import EVENTS

BATCH = 64
Batches = list[tuple[Tensor, Tensor]]
Run = Callable[[int], None]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        added_us: median of what a step costs beyond the plain loop's, over all rounds.
        calls: Python and builtin calls a step beyond the plain loop's.
        per_event_us: what a step takes beyond one without plugins, a plugin and event.
    """

    name: str
    plain_us: float
    added_us: float
    calls: float
    per_event_us: float | None = None


@dataclass(frozen=True)
class Variant:
    """What is measured.

    Args:
        plain: the loop written by hand that it is compared with.
        num_plugins: how many listen.
    """

    name: str
    run: Run
    plain: Run
    num_plugins: int = 0


def make_batches(num_batches: int) -> Batches:
    """Makes random batches, shapes (64, 64) and (64,)."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_batches, BATCH, 64, generator=generator)
    targets = torch.randint(10, (num_batches, BATCH), generator=generator)
    return list(zip(inputs, targets, strict=True))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def plain_run(batches: Batches, metric: MulticlassAccuracy | None) -> Run:
    """Returns a function that makes so many steps of a loop written by hand."""
    model = make_model().train()
    optimizer = make_optimizer(model)
    endless = itertools.cycle(batches)  # as the epochs of the other: the same memory is touched

    def run(num_steps: int) -> None:
        for inputs, targets in itertools.islice(endless, num_steps):
            outputs = model(inputs)
            loss = cross_entropy(outputs, targets)
            if metric is not None:
                metric.update(outputs, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def eventloop_run(batches: Batches, num_plugins: int, metric: MulticlassAccuracy | None) -> Run:
    """Returns a function that makes so many steps of `Trainer.fit`."""
    task = Task(
        model=make_model(),
        loss=cross_entropy,
        train_dataloader=batches,
        optimizer=make_optimizer,
        train_metrics=None if metric is None else {"accuracy": metric},
    )
    trainer = Trainer(
        task,
        callbacks=[make_listener(idx) for idx in range(num_plugins)],
        autoload=False,
        device="cpu",
        precision="fp32",
        max_duration=f"{10**9}ep",
    )
    done = 0

    def run(num_steps: int) -> None:
        nonlocal done
        done += num_steps
        trainer.fit(until=f"{done}ba")

    return run


def make_listener(idx: int) -> object:
    """Makes a callback that implements every event and does nothing."""
    methods: dict[str, Any] = {"name": f"listener-{idx}"}
    for event in EVENTS:
        methods[event] = hookimpl(_NAMED.get(event, _do_nothing()))
    return type("Listener", (), methods)()


def _do_nothing() -> Callable[..., None]:
    def listen(self: object, state: object) -> None: ...

    return listen


def _listen_log(self: object, state: object, numbers: object, at: object) -> None: ...
def _listen_exception(self: object, state: object, error: object) -> None: ...


_NAMED = {"log": _listen_log, "exception": _listen_exception}


def events_a_step() -> int:
    """Counts the events that fire once a batch or microbatch, with one microbatch a batch."""
    return sum(event.per in ("batch", "microbatch") for event in EVENTS.values())


def count_calls(run: Run, num_steps: int) -> float:
    """Counts Python and builtin calls a step; the calls of one `run` itself are taken out."""
    return (_calls_of(run, 2 * num_steps) - _calls_of(run, num_steps)) / num_steps


def _calls_of(run: Run, num_steps: int) -> int:
    calls = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        run(num_steps)
    finally:
        sys.setprofile(None)
    return calls


def measure(num_rounds: int, num_steps: int, num_more: int) -> Iterator[Row]:
    """Measures every variant; with `num_more` plugins, too, unless that is 0."""
    batches = make_batches(2 * num_steps)
    metrics = [MulticlassAccuracy(10, validate_args=False) for _ in range(2)]
    plain, plain_metric = plain_run(batches, None), plain_run(batches, metrics[0])
    variants = [
        Variant("noise floor: plain against plain", plain_run(batches, None), plain),
        Variant("no plugin", eventloop_run(batches, 0, None), plain),
        Variant("one plugin with every event", eventloop_run(batches, 1, None), plain, 1),
        Variant("ten plugins with every event", eventloop_run(batches, 10, None), plain, 10),
        Variant("no plugin, an accuracy each step",
                eventloop_run(batches, 0, metrics[1]), plain_metric),
    ]  # fmt: skip
    if num_more:
        name = f"{num_more} plugins with every event"
        variants.append(Variant(name, eventloop_run(batches, num_more, None), plain, num_more))
    runs = [plain, plain_metric, *(one.run for one in variants)]
    times = interleaved(runs, num_rounds, num_steps)
    without = times[variants[1].run]
    for one in variants:
        plain_us, our_us = times[one.plain], times[one.run]
        per_event = None
        if one.num_plugins:
            per_event = median_difference(our_us, without) / (one.num_plugins * events_a_step())
        calls = count_calls(one.run, num_steps) - count_calls(one.plain, num_steps)
        added_us = median_difference(our_us, plain_us)
        yield Row(one.name, statistics.median(plain_us), added_us, calls, per_event)


def interleaved(runs: Sequence[Run], num_rounds: int, num_steps: int) -> dict[Run, list[float]]:
    """Returns the µs a step of every run in every round, in each of which all have their turn.

    In another order each time, so that none has always the same one before it.
    """
    times: dict[Run, list[float]] = {run: [] for run in runs}
    shuffled, generator = list(runs), random.Random(0)
    for run in runs:
        run(num_steps)
    for _ in range(num_rounds):
        generator.shuffle(shuffled)
        for run in shuffled:
            began = time.perf_counter()
            run(num_steps)
            times[run].append((time.perf_counter() - began) / num_steps * 1e6)
    return times


def median_difference(some: Sequence[float], others: Sequence[float]) -> float:
    """Returns the median over the rounds of what one took more than another."""
    return statistics.median(one - other for one, other in zip(some, others, strict=True))


def show(rows: list[Row]) -> None:
    """Prints the table."""
    table = Table(title="host time a step, against a plain loop")
    for column in ("", "plain µs", "added µs", "added %", "added calls", "µs a plugin and event"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        per_event = "" if row.per_event_us is None else f"{row.per_event_us:.2f}"
        share = f"{row.added_us / row.plain_us:+.1%}"
        table.add_row(row.name, f"{row.plain_us:.0f}", f"{row.added_us:+.1f}", share,
                      f"{row.calls:.1f}", per_event)  # fmt: skip
    Console().print(table)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--plugins", type=int, default=0, help="measure so many, too")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = list(measure(options.rounds, options.steps, options.plugins))
    if options.json:
        sys.stdout.write(json.dumps([row.__dict__ for row in rows], indent=1) + "\n")
    else:
        show(rows)


if __name__ == "__main__":
    main()
