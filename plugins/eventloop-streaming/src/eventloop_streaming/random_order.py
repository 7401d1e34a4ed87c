"""A random order of any number of samples, without holding it in memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Sampler

from eventloop_streaming.stream import mixed_bits, require_positive

_ROUNDS = 6
_AT_ONCE = 4096


class Permuted(Sampler[int]):
    """Yields each index of a dataset once, in random order, computing the order on the fly.

    `RandomSampler` holds a permutation in memory: 800 MB for 100 million samples. This sampler is a
    Feistel network over the smallest square of a power of two that has room for all indices, as in
    format-preserving encryption (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002);
    results beyond the last index are encrypted again. So it can begin anywhere without delay.

    Args:
        num_samples: number of samples.
        seed: seed of the order.
    """

    def __init__(self, num_samples: int, *, seed: int = 0) -> None:
        require_positive(num_samples=num_samples)
        self.num_samples = num_samples
        self.seed = seed
        self.epoch = 0
        self._start = 0
        self._half = max(1, ((num_samples - 1).bit_length() + 1) // 2)  # bits

    def __len__(self) -> int:
        """Returns the number of samples."""
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        """Yields the order of the epoch."""
        first_start = self._start
        self._start = 0
        for start in range(first_start, self.num_samples, _AT_ONCE):
            stop = min(start + _AT_ONCE, self.num_samples)
            indices = self._encrypted(torch.arange(start, stop))
            while (is_behind := indices >= self.num_samples).any():
                indices[is_behind] = self._encrypted(indices[is_behind])
            yield from indices.tolist()

    def start_at(self, num: int) -> None:
        """Skips `num` samples in the next pass."""
        self._start = num

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, which determines the order."""
        self.epoch = epoch

    def _encrypted(self, indices: Tensor) -> Tensor:
        mask = (1 << self._half) - 1
        high_bits = indices >> self._half
        low_bits = indices & mask
        key = mixed_bits(mixed_bits(self.seed) + self.epoch)
        for _ in range(_ROUNDS):
            key = mixed_bits(key)
            # Products of 31 by 31 bits: int64 never overflows.
            scrambled = (low_bits ^ (key & 0x7FFFFFFF)) & 0x7FFFFFFF
            scrambled = (scrambled * ((key >> 33) | 1)) & 0x7FFFFFFFFFFFFFFF
            scrambled = scrambled ^ (scrambled >> 29)
            scrambled = ((scrambled & 0x7FFFFFFF) * 0x2C1B3C6D) ^ (scrambled >> 17)
            high_bits, low_bits = low_bits, high_bits ^ ((scrambled >> 11) & mask)
        return (high_bits << self._half) | low_bits
