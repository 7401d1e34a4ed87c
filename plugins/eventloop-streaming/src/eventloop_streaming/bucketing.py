"""Batch samplers over buckets of similar lengths."""

# N = sample, B = bucket

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from numbers import Integral

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

# Maximum ratio between the longest and the shortest sample of a bucket.
_GROWTH = 1.1


class LengthBatchSampler(Sampler[list[int]]):
    """Batches of `batch_size` samples of similar lengths.

    Samples are sorted into buckets, whose lengths differ by at most a tenth. Each epoch draws an order
    within the buckets, cuts it into batches, and draws an order of the batches; the remaining samples of a
    bucket start a batch with samples of the next longer bucket. Every epoch has the same number of
    batches, and each sample once. With several ranks, batches of the same length are computed at the
    same step.

    Args:
        lengths: the length of each sample of the dataset, ints of 0 or more.
        batch_size: number of samples in a batch.
        shuffle: whether to draw orders; if not, batches are sorted from short to long.
        drop_last: whether to drop a last batch with fewer samples, which has the longest samples.
        generator: random generator of the orders; by default PyTorch's global generator. Leave it out
            with several ranks: eventloop then seeds all ranks alike.

    Raises:
        ValueError: the lengths or the size are invalid.
    """

    def __init__(
        self,
        lengths: Iterable[int] | Tensor,
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        _require_int(batch_size, "batch_size")
        self.batch_size = batch_size
        self._buckets = _Buckets(lengths)
        ends_B = self._buckets.ends_B
        self._spans = [*_spans(ends_B, [batch_size] * len(ends_B))]
        if drop_last and self._spans[-1][1] - self._spans[-1][0] < batch_size:
            self._spans.pop()
        self._shuffle = shuffle
        self._generator = generator

    def __len__(self) -> int:
        """Returns the number of batches in an epoch."""
        return len(self._spans)

    def __iter__(self) -> Iterator[list[int]]:
        """Draws an epoch, and yields the indices of each batch."""
        return self._buckets.batches(self._spans, self._generator, shuffle=self._shuffle)


class TokenBatchSampler(Sampler[list[int]]):
    """Batches of as many samples of similar lengths as `max_tokens` has room for, once padded.

    Like `LengthBatchSampler`, but batches of short samples have more of them: the size of a batch is the number
    of samples times the longest length, at most `max_tokens`.

    Args:
        lengths: the length of each sample of the dataset, ints of 0 or more.
        max_tokens: maximum padded size of a batch, in tokens or another unit of the lengths.
        shuffle, generator: see `LengthBatchSampler`.

    Raises:
        ValueError: the lengths or the number are invalid, or a sample is longer.
    """

    def __init__(
        self,
        lengths: Iterable[int] | Tensor,
        max_tokens: int,
        *,
        shuffle: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        _require_int(max_tokens, "max_tokens")
        self.max_tokens = max_tokens
        self._buckets = _Buckets(lengths)
        longest_B = self._buckets.longest_B
        if longest_B[-1] > max_tokens:
            idx = int(self._buckets.lengths_N.argmax())
            raise ValueError(
                f"sample {idx} has {longest_B[-1]} tokens, more than max_tokens={max_tokens}: "
                "leave such samples out, or cut them"
            )
        sizes_B = [max_tokens // max(longest, 1) for longest in longest_B]
        self._spans = [*_spans(self._buckets.ends_B, sizes_B)]
        self._shuffle = shuffle
        self._generator = generator

    def __len__(self) -> int:
        """Returns the number of batches in an epoch."""
        return len(self._spans)

    def __iter__(self) -> Iterator[list[int]]:
        """Draws an epoch, and yields the indices of each batch."""
        return self._buckets.batches(self._spans, self._generator, shuffle=self._shuffle)


class _Buckets:
    """Samples sorted by length into buckets.

    Args:
        lengths: as in the samplers.

    Attributes:
        lengths_N: int64, shape (N,).
        ends_B: number of samples in each bucket and all buckets before it; no bucket is empty.
        longest_B: the maximum length in each bucket.
    """

    def __init__(self, lengths: Iterable[int] | Tensor) -> None:
        values = lengths.tolist() if isinstance(lengths, Tensor) else [*lengths]
        # bool is a subclass of int.
        invalid = [
            length
            for length in values
            if not isinstance(length, Integral) or isinstance(length, bool)
        ]
        if not invalid:
            invalid = [length for length in values if length < 0]
        if invalid or not values:
            problem = f"lengths has {invalid[0]!r}" if invalid else "lengths is empty"
            raise ValueError(
                f"{problem}: give one int of 0 or more for each sample, and at least one"
            )
        self.lengths_N = torch.tensor([int(length) for length in values])
        bounds = [1]
        while bounds[-1] < self.lengths_N.max():
            bounds.append(max(bounds[-1] + 1, int(bounds[-1] * _GROWTH)))
        found_N = torch.bucketize(self.lengths_N, torch.tensor(bounds))
        counts = torch.bincount(found_N).tolist()
        kinds = [kind for kind, count in enumerate(counts) if count]
        self._bucket_N = found_N
        self.ends_B = [*itertools.accumulate(counts[kind] for kind in kinds)]
        self.longest_B = [int(self.lengths_N[found_N == kind].max()) for kind in kinds]

    def batches(
        self, spans: list[tuple[int, int]], generator: torch.Generator | None, *, shuffle: bool
    ) -> Iterator[list[int]]:
        """Draws an order within buckets and an order of batches; yields the indices of each batch.

        Args:
            spans: start and end of each batch, in the order of buckets.
        """
        num = len(self.lengths_N)
        order_N = torch.randperm(num, generator=generator) if shuffle else self.lengths_N.argsort()
        order_N = order_N[self._bucket_N[order_N].argsort(stable=True)]
        # Each rank takes every `step`-th batch: batches of the same step have similar lengths.
        step = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        steps = [spans[start : start + step] for start in range(0, len(spans), step)]
        num_whole = len(spans) // step
        if shuffle:
            drawn = torch.randperm(num_whole, generator=generator).tolist()
            steps = [steps[idx] for idx in drawn] + steps[num_whole:]
        for begin, end in itertools.chain.from_iterable(steps):
            yield order_N[begin:end].tolist()


def _spans(ends_B: list[int], sizes_B: list[int]) -> Iterator[tuple[int, int]]:
    """Yields start and end of each batch among samples that are sorted by bucket.

    Args:
        sizes_B: maximum size of a batch whose longest sample is in this bucket.
    """
    begin = bucket = 0
    while begin < ends_B[-1]:
        while ends_B[bucket] <= begin:
            bucket += 1
        end = begin
        last_bucket = bucket
        while last_bucket < len(ends_B) and begin + sizes_B[last_bucket] > end:
            end = min(ends_B[last_bucket], begin + sizes_B[last_bucket])
            last_bucket += 1
        yield begin, end
        begin = end


def _require_int(value: object, name: str) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r} is not an int of 1 or more")
