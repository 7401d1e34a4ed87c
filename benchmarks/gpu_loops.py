"""The two loops that gpu_step.py compares, and the data loader that both take from."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from gpu_timeline import synchronize
from gpu_workloads import Batch, Workload

from eventloop import Task, Trainer

Run = Callable[[int], None]


class Batches:
    """An endless data loader over a few batches in pinned memory.

    Attributes:
        host_s: the times between batches, where somebody switched `is_paced` on: before it gives a
            batch it then waits for the device.
        stamps: when each batch was asked for, in seconds.
    """

    def __init__(self, batches: list[Batch], device: torch.device) -> None:
        self.host_s: list[float] = []
        self.stamps: list[float] = []
        self.is_paced = False
        self._batches = batches
        self._device = device
        self._since: float | None = None

    def __iter__(self) -> Iterator[Batch]:
        for batch in itertools.cycle(self._batches):
            if self.is_paced:
                self._pace()
            self.stamps.append(time.perf_counter())
            yield batch

    def host_ms(self, run: Run, num_steps: int) -> float:
        """Returns the median time between two batches of a run."""
        self.host_s, self._since, self.is_paced = [], None, True
        run(num_steps)
        self.is_paced = False
        return statistics.median(self.host_s) * 1e3

    def _pace(self) -> None:
        if self._since is not None:
            self.host_s.append(time.perf_counter() - self._since)
        synchronize(self._device)
        self._since = time.perf_counter()


@contextmanager
def plain_run(
    workload: Workload, batches: Batches, device: torch.device, *, compiled: bool
) -> Iterator[Run]:
    """Returns a function that makes so many steps of a loop written by hand."""
    torch.manual_seed(0)
    model = workload.make_model().to(device).train()
    if workload.is_convolutional:
        model = model.to(memory_format=torch.channels_last)
    optimizer = workload.make_optimizer(model)
    fetched = prefetched(batches, device)

    def forward(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return workload.loss(model(inputs), targets)

    compute = torch.compile(forward) if compiled else forward

    def run(num_steps: int) -> None:
        for inputs, targets in itertools.islice(fetched, num_steps):
            with torch.autocast(device.type, torch.bfloat16):
                loss = compute(inputs, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    yield run


def prefetched(batches: Batches, device: torch.device) -> Iterator[Batch]:
    """Copies each batch a step ahead, on a stream of its own."""
    if device.type == "cpu":
        yield from batches
        return
    side = torch.Stream(device)
    ahead: Batch | None = None
    for inputs, targets in batches:
        now = ahead
        if now is not None:
            computing = torch.accelerator.current_stream(device)
            computing.wait_stream(side)
            for one in now:
                one.record_stream(computing)
        with side:
            ahead = (inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True))
        if now is not None:
            yield now


@contextmanager
def eventloop_run(
    workload: Workload, batches: Batches, device: torch.device, *, compiled: bool, **given: Any
) -> Iterator[Run]:
    """Returns a function that makes so many steps of `Trainer.fit`.

    Args:
        given: more of `Trainer`: plugins, settings.
    """
    task = Task(
        model=workload.make_model,
        loss=workload.loss,
        train_dataloader=batches,
        optimizer=workload.make_optimizer,
    )
    settings: Any = {
        "device": str(device),
        "precision": "bf16",
        "compile": compiled,
        "max_duration": f"{10**9}ba",
        **given,
    }
    done = 0
    with Trainer(task, autoload=False, **settings) as trainer:

        def run(num_steps: int) -> None:
            nonlocal done
            done += num_steps
            trainer.fit(until=f"{done}ba")

        yield run
