"""Names the sample in exceptions that a map-style data set raises, including in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from eventloop.data.in_memory import StandIn
from eventloop.errors import Note, first_of, notes_of

_MOST_INDICES = 8


def read_samples(dataset: Any, indices: Sequence[Any]) -> list[Any]:
    """Returns the samples at these indices; an exception gets a note with the index that failed."""
    samples: list[Any] = []
    try:
        # One `try` for all samples is faster; the number of samples read tells the index that failed.
        for index in indices:
            samples.append(dataset[index])
    except Exception as error:
        note_samples(error, dataset, indices[len(samples) : len(samples) + 1])
        raise
    return samples


def read_batch(dataset: Any, indices: Sequence[Any]) -> Any:
    """Calls `__getitems__`; an exception gets a note with all indices of the batch."""
    try:
        return dataset.__getitems__(indices)
    except Exception as error:
        note_samples(error, dataset, indices)
        raise


def note_samples(error: Exception, dataset: Any, indices: Sequence[Any]) -> None:
    """Adds a note to an exception with the samples that were read, unless it has one already."""
    if notes_of(error, "samples") or not len(indices):
        return
    shown = first_of(map(repr, indices), _MOST_INDICES)
    samples = f"the sample at index {shown}" if len(indices) == 1 else f"the samples at {shown}"
    with suppress(Exception):  # an exception may refuse attributes
        error.add_note(
            Note(f"raised by the data set {type(dataset).__name__} for {samples}", "samples")
        )


class NamedSamples(StandIn):
    """Wraps a data set, naming the sample in exceptions."""

    __slots__ = ("_read",)

    def __init__(self, dataset: Any, *, in_batches: bool) -> None:
        read: Callable[[Any, Sequence[Any]], Any] = read_batch if in_batches else read_samples
        super().__init__(dataset, _read=read)

    def __reduce__(self) -> tuple[Any, ...]:
        return _named, (self._dataset, self._read is read_batch)

    def __getitem__(self, index: Any) -> Any:
        return read_samples(self._dataset, [index])[0]

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        """Reads the samples of a batch, as the loader asks for them."""
        return self._read(self._dataset, indices)


def _named(dataset: Any, in_batches: bool) -> NamedSamples:
    return NamedSamples(dataset, in_batches=in_batches)
