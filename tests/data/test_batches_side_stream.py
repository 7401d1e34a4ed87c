"""Copies on a side stream: what is queued where, in which order, and what is left alone.

There is no GPU here: streams are lists of what was queued, tensors tell them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from eventloop.data.batches import SideStream, mover_to

DEVICE = torch.device("meta")


class Queue:
    """A stream that notes what it is told."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Queue) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class Queues:
    """What `torch.cuda` is: the streams of a device, one of them current."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = Queue("computing", self.log)

    def Stream(self, device: torch.device) -> Queue:
        return Queue("side", self.log)

    def current_stream(self, device: torch.device) -> Queue:
        return self.current

    @contextmanager
    def stream(self, stream: Queue) -> Iterator[None]:
        outer, self.current = self.current, stream
        yield
        self.current = outer


class Told(Tensor):
    """A tensor that notes on which stream it is copied, and by which it is held."""

    queues: Queues
    pinned = False

    def is_pinned(self) -> bool:
        return self.pinned

    def pin_memory(self) -> Told:
        self.queues.log.append("pin")
        return told(self, self.queues, pinned=True)

    def to(self, device: torch.device, non_blocking: bool = False) -> Told:
        assert self.pinned
        assert non_blocking
        self.queues.log.append(f"copy on {self.queues.current.name}")
        return told(torch.empty(self.shape, device=device), self.queues)

    def record_stream(self, stream: Queue) -> None:
        self.queues.log.append(f"held by {stream.name}")


def told(tensor: Tensor, queues: Queues, *, pinned: bool = False) -> Told:
    made = tensor.as_subclass(Told)
    made.queues, made.pinned = queues, pinned
    return made


class Graph:
    """An object with `.to` of its own, whose memory nobody knows."""

    def __init__(self, queues: Queues) -> None:
        self.queues = queues

    def to(self, device: torch.device, non_blocking: bool = False) -> Graph:
        self.queues.log.append(f"object on {self.queues.current.name}")
        return self


@pytest.fixture
def queues() -> Queues:
    return Queues()


def test_a_tensor_is_pinned_copied_aside_and_held_for_those_who_compute(queues):
    """In this order; whoever computes waits for the copy, the host for nothing."""
    moved = SideStream(DEVICE, queues)(told(torch.ones(2), queues))

    assert moved.device == DEVICE
    assert queues.log == [
        "pin", "copy on side", "computing waits for side", "held by computing",
    ]  # fmt: skip


def test_a_nest_is_waited_for_once_and_keeps_its_shape(queues):
    """Pinned memory, as of DataLoader(pin_memory=True), isn't pinned again."""
    pinned = told(torch.ones(2), queues, pinned=True)

    moved = SideStream(DEVICE, queues)({"x": [pinned, pinned], "name": "text"})

    assert (list(moved), moved["name"], len(moved["x"])) == (["x", "name"], "text", 2)
    assert queues.log == [
        *["copy on side"] * 2, "computing waits for side", *["held by computing"] * 2,
    ]  # fmt: skip


def test_what_is_on_the_device_stays(queues):
    """It may be in use there; a copy would cost and a second owner confuse."""
    there = told(torch.empty(2, device=DEVICE), queues)

    assert SideStream(DEVICE, queues)((there,))[0] is there
    assert queues.log == []


def test_an_object_with_its_own_to_is_copied_where_it_is_used(queues):
    """Its tensors can't be held, so that their memory must not belong to the side stream."""
    SideStream(DEVICE, queues)(Graph(queues))

    assert queues.log == ["object on computing"]


def test_each_device_has_its_way():
    """On the host there is nothing to do, and other devices have no side stream here."""
    batch = (torch.ones(2),)

    assert mover_to(torch.device("cpu"))(batch) is batch
    assert mover_to(DEVICE)(batch)[0].device == DEVICE
