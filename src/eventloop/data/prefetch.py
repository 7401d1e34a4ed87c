"""From host to device: each batch is copied on a stream of its own, beside what is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eventloop.data.batches import map_tensors

Move = Callable[[Any], Any]


def mover_to(device: torch.device) -> Move:
    """Returns the function that copies a batch to a device, without waiting for the copy.

    Batches come from the host, so that nothing is to be done where the device is the host.
    """
    if device.type == "cpu":
        return lambda batch: batch
    if device.type == "cuda":
        return SideStream(device, torch.cuda)
    return lambda batch: map_tensors(lambda one: one.to(device, non_blocking=True), batch)


class SideStream:
    """Copies batches on a side stream, from pinned memory.

    The loop never waits for the device, so that it asks for a batch while the device still computes
    on the one before: a copy that isn't queued behind that runs beside it. No batch has to be
    fetched ahead, and random draws keep the order of a plain loop.

    Tensors that are on the device stay as they are. An object with `.to` of its own is copied on
    the current stream, since which memory it holds isn't known.

    Args:
        device: where batches go.
        streams: `torch.cuda`, or what has its `Stream`, `stream` and `current_stream`.
    """

    def __init__(self, device: torch.device, streams: Any) -> None:
        self._device = device
        self._streams = streams
        self._side = streams.Stream(device)

    def __call__(self, batch: Any) -> Any:
        """Returns the batch on the device, usable by what is queued from now on."""
        copies: list[Tensor] = []

        def move(one: Any) -> Any:
            if not isinstance(one, Tensor):
                return one.to(self._device, non_blocking=True)
            if one.device == self._device:
                return one
            if one.device.type == "cpu" and not one.is_pinned():
                one = one.pin_memory()
            with self._streams.stream(self._side):
                copies.append(one.to(self._device, non_blocking=True))
            return copies[-1]

        moved = map_tensors(move, batch)
        if copies:
            computing = self._streams.current_stream(self._device)
            computing.wait_stream(self._side)
            for copy in copies:
                # The memory is the side stream's: it is given back when computing is done with it.
                copy.record_stream(computing)
        return moved
