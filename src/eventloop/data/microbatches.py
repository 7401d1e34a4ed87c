"""Batches that come in parts, each padded by itself; a batch in one piece is split in `microbatch_splitting.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from eventloop.errors import a


class Microbatches:
    """A batch in parts, each of them a microbatch: a collate function or a data loader may return it.

    The parts may have different sizes and shapes. They are trained on one after the other, with one
    step for all, as they are: nothing slices or joins them, and a `microbatch_size` is an error. The
    batch counts for the samples and tokens of all its parts. An evaluation takes each part as a batch.

    Args:
        parts: batches, at least one.

    Raises:
        TypeError: a batch was given instead of a list of them.
        ValueError: there is none.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Iterable[Any]) -> None:
        if isinstance(parts, Mapping | Tensor | str):
            kind = a(type(parts).__name__)
            raise TypeError(
                f"Microbatches takes a list of batches, not {kind}; write Microbatches([batch])"
            )
        self.parts = tuple(parts)
        if not self.parts:
            raise ValueError("Microbatches got no part: a batch has at least one")
        if any(isinstance(one, Microbatches) for one in self.parts):
            raise ValueError(
                "Microbatches got Microbatches as a part: give the parts of all in one"
            )

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.parts)

    def __repr__(self) -> str:
        return f"Microbatches({list(self.parts)!r})"

    def pin_memory(self) -> Microbatches:
        """Returns one of parts in pinned memory; a DataLoader with `pin_memory=True` calls it."""
        from torch.utils.data._utils.pin_memory import pin_memory  # private (torch 2.13)

        return Microbatches(map(pin_memory, self.parts))


def collated(collate_fn: Callable[[list[Any]], Any], *, microbatch_size: int) -> Collated:
    """Returns a collate function that makes `Microbatches` of a batch's samples.

    Each part is padded to its own longest sample, where padding a whole batch first and slicing it
    would pad every sample to the longest of all:

        collate_fn = collated(pad, microbatch_size=4)
        DataLoader(dataset, batch_size=64, shuffle=True, collate_fn=collate_fn)

    Args:
        collate_fn: makes a batch of a list of samples.
        microbatch_size: samples in a part, the last may have fewer.

    Raises:
        ValueError: the size isn't an int of 1 or more.
    """
    if type(microbatch_size) is not int or microbatch_size < 1:
        raise ValueError(f"microbatch_size={microbatch_size!r} is not an int of 1 or more")
    return Collated(collate_fn, microbatch_size)


@dataclass(frozen=True)
class Collated:
    """What `collated` returns: a class, so that it can be sent to workers that are spawned."""

    collate_fn: Callable[[list[Any]], Any]
    microbatch_size: int

    def __call__(self, samples: Sequence[Any]) -> Microbatches:
        """Collates the samples of each part."""
        size = self.microbatch_size
        starts = range(0, len(samples), size)
        return Microbatches(self.collate_fn([*samples[at : at + size]]) for at in starts)


def microbatches_of(batch: Any) -> tuple[Any, ...]:
    """Returns the parts of `Microbatches`, or the batch alone."""
    return batch.parts if isinstance(batch, Microbatches) else (batch,)
