"""Batches that the data loader has split into microbatches, for example to pad each one separately."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from eventloop.errors import a


class Microbatches:
    """A batch that consists of microbatches. A collate function or a data loader may return it.

    The microbatches may have different sizes and shapes. They are trained on one after the other, with
    a single optimizer step. They are never sliced or joined, and setting `microbatch_size` is an
    error. The batch has the samples and tokens of all its microbatches. An evaluation treats each
    microbatch as a batch.

    Args:
        parts: the microbatches, at least one.

    Raises:
        TypeError: `parts` is a batch instead of a list of batches.
        ValueError: `parts` is empty, or contains `Microbatches`.
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
            raise ValueError("Microbatches got no parts: a batch has at least one")
        if any(isinstance(part, Microbatches) for part in self.parts):
            raise ValueError("Microbatches can't be nested; pass all parts to one Microbatches")

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.parts)

    def __repr__(self) -> str:
        return f"Microbatches({list(self.parts)!r})"

    def pin_memory(self) -> Microbatches:
        """Returns a copy in pinned memory; a DataLoader with `pin_memory=True` calls this."""
        from torch.utils.data._utils.pin_memory import pin_memory  # private (torch 2.13)

        return Microbatches(map(pin_memory, self.parts))


def collated(collate_fn: Callable[[list[Any]], Any], *, microbatch_size: int) -> Collated:
    """Returns a collate function that makes `Microbatches` of a batch's samples.

    Each microbatch is padded to its own longest sample. Padding the whole batch before splitting it
    would pad every sample to the longest sample of the batch:

        collate_fn = collated(pad, microbatch_size=4)
        DataLoader(dataset, batch_size=64, shuffle=True, collate_fn=collate_fn)

    Args:
        collate_fn: makes a batch of a list of samples.
        microbatch_size: the number of samples in a microbatch; the last may have fewer.

    Raises:
        ValueError: the size isn't an int of 1 or more.
    """
    if type(microbatch_size) is not int or microbatch_size < 1:
        raise ValueError(f"microbatch_size={microbatch_size!r} is not an int of 1 or more")
    return Collated(collate_fn, microbatch_size)


@dataclass(frozen=True)
class Collated:
    """The collate function that `collated` returns; a class, so that it can be pickled for workers."""

    collate_fn: Callable[[list[Any]], Any]
    microbatch_size: int

    def __call__(self, samples: Sequence[Any]) -> Microbatches:
        """Collates the samples of each microbatch."""
        size = self.microbatch_size
        starts = range(0, len(samples), size)
        return Microbatches(self.collate_fn([*samples[start : start + size]]) for start in starts)


def microbatches_of(batch: Any) -> tuple[Any, ...]:
    """Returns the parts of `Microbatches`, or `(batch,)` for any other batch."""
    return batch.parts if isinstance(batch, Microbatches) else (batch,)
