"""Samples that an epoch gives several times, told apart, so that each time draws other numbers."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler


class Again(int):
    """The index of a sample that the epoch has given before; an int to everybody else.

    Attributes:
        times: how often it has been given before.
    """

    times: int

    def __new__(cls, index: int, times: int = 0) -> Again:
        """Makes it of the index."""
        made = super().__new__(cls, index)
        made.times = times
        return made


def may_repeat(sampler: Any) -> bool:
    """Tells whether a sampler may give an index twice an epoch: no, if it is known not to.

    A `DistributedSampler` does, to give all ranks as many; those few draw the same again.
    """
    kind = type(sampler)
    if kind is BatchSampler:
        return may_repeat(sampler.sampler)
    if kind is RandomSampler:
        return bool(sampler.replacement) or len(sampler) > len(sampler.data_source)
    return kind not in (SequentialSampler, DistributedSampler)


def numbered(indices: Iterable[Any]) -> Iterator[Any]:
    """Gives indices, or lists of them, with those that come again as `Again`.

    What is no whole number, such as a name, stays as it is.
    """
    counts: dict[int, int] = {}

    def number(index: Any) -> Any:
        if type(index) is Again:
            return index
        try:
            key = operator.index(index)
        except TypeError:
            return index
        times = counts.get(key, 0)
        counts[key] = times + 1
        return Again(key, times) if times else index

    for one in indices:
        yield [number(index) for index in one] if isinstance(one, (list, tuple)) else number(one)
