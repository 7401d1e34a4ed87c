"""Histograms, counted where the tensors are, without a wait for the device.

The buckets are TensorFlow's own: their bounds grow by a tenth from 1e-12 on, below zero as above,
so that nothing about a tensor has to be known beforehand.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor
from torch.utils.tensorboard.summary import histogram_raw

from eventloop.devices import kind_of

_POSITIVE = [1e-12 * 1.1**power for power in range(581)]
_MOST = torch.finfo(torch.float32).max
# What lies before the first bound or behind the last isn't finite.
BOUNDS = [-_MOST, *(-one for one in reversed(_POSITIVE)), 0.0, *_POSITIVE, _MOST]


class Measured(NamedTuple):
    """What histograms are made of.

    Args:
        counts: int64, shape (tensors, buckets); how many entries lie below each of `BOUNDS` and not below the one before.
        stats: float32, shape (tensors, 4); smallest and largest entry, sum, sum of squares; of finite ones.
    """

    counts: Tensor
    stats: Tensor


@torch.no_grad()
def measure(tensors: Sequence[Tensor]) -> Measured:
    """Counts the entries of tensors by size.

    Args:
        tensors: real, with at least one entry each, on one device.

    Returns:
        Tensors on the same device, possibly still being computed.
    """
    counts = []
    stats = []
    for tensor in tensors:
        entries = tensor.detach().reshape(-1).to(torch.float32)
        buckets = torch.bucketize(entries, bounds_on(entries.device), right=True)
        one = torch.ones((), dtype=torch.int64, device=entries.device)
        empty = torch.zeros(len(BOUNDS) + 1, dtype=torch.int64, device=entries.device)
        counts.append(empty.scatter_add_(0, buckets, one.expand_as(buckets)))
        finite = entries.isfinite()
        known = entries.where(finite, 0)
        low, high = (entries.where(finite, end).aminmax() for end in (torch.inf, -torch.inf))
        stats.append(torch.stack((low.min, high.max, known.sum(), known.square().sum())))
    return Measured(torch.stack(counts), torch.stack(stats))


def histogram(tag: str, counts: Sequence[int], stats: Sequence[float]) -> Summary | None:
    """Makes a histogram of one tensor's row of `Measured`; None where no entry is finite."""
    filled = [idx for idx, count in enumerate(counts[1:-1], 1) if count]
    if not filled:
        return None
    # Of a row of empty buckets one is enough, with the bound of the last.
    edges = sorted({*filled, *(idx - 1 for idx in filled[1:])})
    bounds = [BOUNDS[idx] for idx in edges]
    found = [counts[idx] for idx in edges]
    low, high, total, squares = stats
    summary: Summary = histogram_raw(  # type: ignore[no-untyped-call]
        tag, low, high, sum(found), total, squares, bounds, found
    )
    return summary


@functools.lru_cache(maxsize=8)
def bounds_on(device: torch.device) -> Tensor:
    """Returns the bounds of the buckets; the first call for a device waits for it."""
    return torch.tensor(BOUNDS, dtype=torch.float32, device=device)


class OnTheWay:
    """What was measured, on its way to the host.

    Args:
        step: the batch that it belongs to.
        tags: one for each tensor.
    """

    def __init__(self, step: int, tags: Sequence[str], measured: Measured) -> None:
        self.step = step
        self.tags = tags
        kind = kind_of(measured.counts.device)
        self._copies = [kind.host_copy(one) for one in measured]
        self._copied = kind.record()

    def is_there(self) -> bool:
        """Returns whether `histograms` would return without waiting."""
        return self._copied is None or self._copied.query()

    def histograms(self) -> list[Summary]:
        """Returns the histograms of the tensors that have one; waits where they aren't there."""
        if self._copied is not None:
            self._copied.synchronize()
        rows = zip(self.tags, *(one.tolist() for one in self._copies), strict=True)
        made = (histogram(tag, counts, stats) for tag, counts, stats in rows)
        return [one for one in made if one is not None]
