"""Histograms, computed on the tensors' device, without synchronization.

The buckets are TensorFlow's own: their bounds grow by a tenth from 1e-12 on, for positive and negative
values, so that the range of a tensor needn't be known in advance.
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
# Values outside the first and last bounds aren't finite.
BOUNDS = [-_MOST, *(-bound for bound in reversed(_POSITIVE)), 0.0, *_POSITIVE, _MOST]


class Measured(NamedTuple):
    """The values from which histograms are made.

    Args:
        counts: int64, shape (tensors, buckets); number of entries below each of `BOUNDS` and at or above
            the previous bound.
        stats: float32, shape (tensors, 4); minimum, maximum, sum and sum of squares of finite entries.
    """

    counts: Tensor
    stats: Tensor


@torch.no_grad()
def measure(tensors: Sequence[Tensor]) -> Measured:
    """Counts the entries of tensors by size.

    Args:
        tensors: real tensors on the same device, each with at least one entry.

    Returns:
        Tensors on the same device, possibly still being computed.
    """
    counts = []
    stats = []
    for tensor in tensors:
        entries = tensor.detach().reshape(-1).to(torch.float32)
        buckets = torch.bucketize(entries, bounds_on(entries.device), right=True)
        unit = torch.ones((), dtype=torch.int64, device=entries.device)
        empty = torch.zeros(len(BOUNDS) + 1, dtype=torch.int64, device=entries.device)
        counts.append(empty.scatter_add_(0, buckets, unit.expand_as(buckets)))
        finite = entries.isfinite()
        finite_entries = entries.where(finite, 0)
        low, high = (entries.where(finite, end).aminmax() for end in (torch.inf, -torch.inf))
        stats.append(
            torch.stack((low.min, high.max, finite_entries.sum(), finite_entries.square().sum()))
        )
    return Measured(torch.stack(counts), torch.stack(stats))


def histogram(tag: str, counts: Sequence[int], stats: Sequence[float]) -> Summary | None:
    """Makes a histogram of a tensor's row of `Measured`; None if no entry is finite."""
    filled = [idx for idx, count in enumerate(counts[1:-1], 1) if count]
    if not filled:
        return None
    # Adjacent empty buckets are merged into a single bucket.
    edges = sorted({*filled, *(idx - 1 for idx in filled[1:])})
    bounds = [BOUNDS[idx] for idx in edges]
    bucket_counts = [counts[idx] for idx in edges]
    low, high, total, squares = stats
    summary: Summary = histogram_raw(  # type: ignore[no-untyped-call]
        tag, low, high, sum(bucket_counts), total, squares, bounds, bucket_counts
    )
    return summary


@functools.lru_cache(maxsize=8)
def bounds_on(device: torch.device) -> Tensor:
    """Returns the bounds of the buckets; the first call for a device synchronizes."""
    return torch.tensor(BOUNDS, dtype=torch.float32, device=device)


class OnTheWay:
    """Measured values that are being copied to the host.

    Args:
        step: number of the batch.
        tags: a tag for each tensor.
    """

    def __init__(self, step: int, tags: Sequence[str], measured: Measured) -> None:
        self.step = step
        self.tags = tags
        kind = kind_of(measured.counts.device)
        self._copies = [kind.host_copy(tensor) for tensor in measured]
        self._copied = kind.record()

    def is_there(self) -> bool:
        """Whether `histograms` would return without waiting."""
        return self._copied is None or self._copied.query()

    def histograms(self) -> list[Summary]:
        """Returns the histograms of tensors with finite entries; waits for the copies if necessary."""
        if self._copied is not None:
            self._copied.synchronize()
        rows = zip(self.tags, *(copy.tolist() for copy in self._copies), strict=True)
        summaries = (histogram(tag, counts, stats) for tag, counts, stats in rows)
        return [summary for summary in summaries if summary is not None]
