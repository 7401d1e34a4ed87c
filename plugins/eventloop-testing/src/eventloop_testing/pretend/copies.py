"""Copies between host and device that are not known to be complete."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from eventloop_testing.pretend import lines
from eventloop_testing.pretend.errors import RaceError
from eventloop_testing.pretend.failing import fail


class CopyToHost(NamedTuple):
    """A copy whose target doesn't hold its values yet."""

    number: int
    position: int
    target: Tensor
    values: Tensor


class CopyFromHost(NamedTuple):
    """A copy whose source the device may still have to read."""

    number: int
    position: int
    source: Tensor
    values: Tensor

    def check(self) -> None:
        """Raises RaceError if the source has changed since the copy was queued."""
        if not _is_same(self.source, self.values):
            _from_host[:] = [copy for copy in _from_host if copy is not self]
            fail(
                RaceError(
                    "a pinned buffer was written while a non-blocking copy of it to the device was "
                    "not known to be complete: record an event after the copy, and call its "
                    "synchronize() before the buffer is written"
                )
            )


_to_host: list[CopyToHost] = []
_from_host: list[CopyFromHost] = []


def queue_to_host(target: Tensor, values: Tensor) -> None:
    """Queues a copy on the current line; until the host waits for it, the target holds invalid values."""
    line = lines.current()
    _to_host.append(CopyToHost(line.number, line.advance(), target, values.clone()))
    _spoil(target, values)


def queue_from_host(source: Tensor) -> CopyFromHost:
    """Queues a read of a pinned tensor on the current line; the tensor mustn't change until it is done."""
    line = lines.current()
    copy = CopyFromHost(line.number, line.advance(), source, source.clone())
    _from_host.append(copy)
    return copy


def settle() -> None:
    """Completes the copies that the host has waited for; raises RaceError for spoilt sources."""
    for copy in _taken(_to_host):
        copy.target.copy_(copy.values)
    for source in _taken(_from_host):
        source.check()


def forget() -> None:
    """Drops pending copies, at the end of a test."""
    _to_host.clear()
    _from_host.clear()


def _taken(copies: list[Any]) -> list[Any]:
    """Removes the copies that the host has waited for from a list, and returns them."""
    completed = [copy for copy in copies if lines.is_done(copy.number, copy.position)]
    copies[:] = [copy for copy in copies if not lines.is_done(copy.number, copy.position)]
    return completed


def _is_same(tensor: Tensor, other_tensor: Tensor) -> bool:
    """Whether two tensors have the same bytes: NaN equals itself."""
    return torch.equal(_bytes(tensor), _bytes(other_tensor))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _spoil(tensor: Tensor, values: Tensor) -> None:
    """Fills a tensor with values that make any result computed from it wrong: NaN, or other than `values`."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.copy_(values).logical_not_()
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).min)


lines.when_the_host_waits(settle)
