"""A train data loader of litdata that goes on exactly, with workers and after each stop."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch


class LitdataState:
    """A `StreamingDataLoader` of litdata over a `StreamingDataset`, with a state that is complete.

    litdata's own (0.2.76) forgets the epoch of a loader that goes on with workers, so that the next state is wrong.
    The seeds of workers are drawn from a generator of the loader, or a run that goes on would draw other numbers for dropout.

    Args:
        loader: not wrapped otherwise; the same number of workers and the same batch size in a resumed run.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._is_loaded = False
        if loader.generator is None:
            loader.generator = torch.Generator()

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches of an epoch, or after `load_state_dict` those that are left of it."""
        # It is reset where an iterator was exhausted, and the trainer stops at the length.
        self._loader.restore, self._is_loaded = self._is_loaded, False
        return iter(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position."""
        state: dict[str, Any] = copy.deepcopy(self._loader.state_dict())  # changed later
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned."""
        self._loader.load_state_dict(copy.deepcopy(dict(state)))
        self._loader.dataset.current_epoch = state["dataset"]["current_epoch"]
        self._is_loaded = self._loader.restore
