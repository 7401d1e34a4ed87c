"""Host time: what eventloop adds to a step, against a plain loop that does the same work.

Both train a 64-128-10 perceptron on batches of 64 with SGD and momentum, in one thread. They are
interleaved in one run, a thousand steps of each in turn, and compared pair by pair, so that a
noisy machine disturbs both alike; the noise floor is the same measurement of the plain loop against
itself. Calls are counted beside it, which no noise touches.

    python benchmarks/host_time.py [--pairs 40] [--steps 1000] [--plugins 200] [--json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassAccuracy

from eventloop import Event, Task, Trainer, hookimpl

BATCH = 64
Batches = list[tuple[Tensor, Tensor]]
Run = Callable[[int], None]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        added_us: median of what a step costs beyond the plain loop's, over all pairs.
        calls: Python and builtin calls a step beyond the plain loop's.
        per_event_us: `added_us` beyond the row without plugins, a plugin and event.
    """

    name: str
    plain_us: float
    added_us: float
    calls: float
    per_event_us: float | None = None


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
    """Gives a function that makes so many steps of a loop written by hand."""
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
    """Gives a function that makes so many steps of `Trainer.fit`."""
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
    for event in Event:
        methods[event] = hookimpl(_NAMED.get(event, _do_nothing()))
    return type("Listener", (), methods)()


def _do_nothing() -> Callable[..., None]:
    def listen(self: object, state: object) -> None: ...

    return listen


def _listen_log(self: object, state: object, numbers: object, at: object) -> None: ...
def _listen_exception(self: object, state: object, error: object) -> None: ...


_NAMED = {Event.LOG: _listen_log, Event.EXCEPTION: _listen_exception}


def events_a_step() -> int:
    """Counts the events that fire once a batch or microbatch, with one microbatch a batch."""
    return sum(event.per in ("batch", "microbatch") for event in Event)


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


def compare(plain: Run, other: Run, num_pairs: int, num_steps: int) -> tuple[float, float]:
    """Measures two loops in turn; gives the plain one's µs a step and the median difference."""
    for run in (plain, other):
        run(num_steps)
    plain_us, added_us = [], []
    for idx in range(num_pairs):
        first, second = (plain, other) if idx % 2 else (other, plain)
        times = {first: _time(first, num_steps)}
        times[second] = _time(second, num_steps)
        plain_us.append(times[plain])
        added_us.append(times[other] - times[plain])
    return statistics.median(plain_us), statistics.median(added_us)


def _time(run: Run, num_steps: int) -> float:
    began = time.perf_counter()
    run(num_steps)
    return (time.perf_counter() - began) / num_steps * 1e6


def measure(num_pairs: int, num_steps: int, num_more: int) -> Iterator[Row]:
    """Measures every variant; with `num_more` plugins, too, unless that is 0."""
    batches = make_batches(2 * num_steps)
    plain_us, noise_us = compare(plain_run(batches, None), plain_run(batches, None),
                                 num_pairs, num_steps)  # fmt: skip
    yield Row("noise floor: plain against plain", plain_us, noise_us, 0)
    without: float | None = None
    variants = [
        ("no plugin", 0, False),
        ("one plugin with every event", 1, False),
        ("ten plugins with every event", 10, False),
        ("no plugin, an accuracy each step", 0, True),
    ]
    if num_more:
        variants.append((f"{num_more} plugins with every event", num_more, False))
    for name, num_plugins, with_metric in variants:
        metrics = [MulticlassAccuracy(10, validate_args=False) if with_metric else None
                   for _ in range(2)]  # fmt: skip
        plain = plain_run(batches, metrics[0])
        other = eventloop_run(batches, num_plugins, metrics[1])
        plain_us, added_us = compare(plain, other, num_pairs, num_steps)
        calls = count_calls(other, num_steps) - count_calls(plain, num_steps)
        per_event = None
        if num_plugins and without is not None:
            per_event = (added_us - without) / (num_plugins * events_a_step())
        elif not with_metric:
            without = added_us
        yield Row(name, plain_us, added_us, calls, per_event)


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
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--plugins", type=int, default=0, help="measure so many, too")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = list(measure(options.pairs, options.steps, options.plugins))
    if options.json:
        sys.stdout.write(json.dumps([row.__dict__ for row in rows], indent=1) + "\n")
    else:
        show(rows)


if __name__ == "__main__":
    main()
