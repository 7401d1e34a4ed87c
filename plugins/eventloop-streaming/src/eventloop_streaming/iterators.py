"""A train data loader over iterables that store their position in iterators, such as grain's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch.utils.data import default_convert


class IteratorState:
    """Batches of an iterable whose iterators have `get_state` and `set_state`, with a saved position.

    Arrays become tensors. For grain: `IteratorState(grain.MapDataset.source(data).shuffle(seed=0).batch(32).to_iter_dataset())`.

    Args:
        batches: an iterable that can be iterated over repeatedly.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches
        self._iterator: Any = None
        self._loaded: Any = None

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches of an epoch, or after `load_state_dict` its remaining batches."""
        iterator: Any = iter(self._batches)
        if not hasattr(iterator, "get_state"):
            raise TypeError(f"a {type(iterator).__name__} has no get_state and set_state")
        if self._loaded is not None:
            iterator.set_state(self._loaded)
        self._iterator = iterator
        self._loaded = None
        return map(default_convert, map(_plain, iterator))

    def state_dict(self) -> dict[str, Any]:
        """Returns the position."""
        if self._loaded is not None or self._iterator is None:
            return {"iterator": self._loaded}
        return {"iterator": self._iterator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a position from `state_dict`."""
        self._loaded = state["iterator"]


def _plain(batch: Any) -> Any:
    """Returns a batch with plain NumPy arrays instead of subclasses, which grain's workers send."""
    if isinstance(batch, np.ndarray):
        return np.asarray(batch)
    if isinstance(batch, Mapping):
        return {name: _plain(nested) for name, nested in batch.items()}
    if isinstance(batch, (list, tuple)):
        entries = [_plain(nested) for nested in batch]
        return type(batch)(*entries) if hasattr(batch, "_fields") else type(batch)(entries)
    return batch
