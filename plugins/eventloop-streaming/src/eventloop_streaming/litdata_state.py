"""Exact resuming of a litdata train data loader, with workers and any number of times."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from eventloop import TaskError


class LitdataState:
    """A `StreamingDataLoader` of litdata over a `StreamingDataset`, with a complete state.

    litdata's own state (0.2.76) loses the epoch of a dataset that resumes with workers, so the next state is wrong.

    Args:
        loader: the data loader itself; a resumed run needs the same number of workers and batch size.

    Raises:
        TaskError: the loader's state has another format than in litdata 0.2.76.
    """

    def __init__(self, loader: Any) -> None:
        state = loader.state_dict() if hasattr(loader, "restore") else {}
        if "current_epoch" not in state or "current_epoch" not in state["dataset"]:
            data = type(getattr(loader, "dataset", None)).__name__
            raise TaskError(
                f"LitdataState doesn't know the state of a {type(loader).__name__} over a {data}",
                fix="give it a StreamingDataLoader over a StreamingDataset, with litdata 0.2.76",
            )
        self._loader = loader
        self._is_loaded = False

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches of an epoch, or after `load_state_dict` its remaining batches."""
        # Undocumented (0.2.76): only an exhausted iterator resets it, and the trainer stops at the length.
        self._loader.restore = self._is_loaded
        self._is_loaded = False
        return iter(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position."""
        state: dict[str, Any] = copy.deepcopy(self._loader.state_dict())  # litdata changes it later
        state["dataset"]["current_epoch"] = state["current_epoch"]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a position from `state_dict`."""
        self._loader.load_state_dict(copy.deepcopy(dict(state)))
        self._is_loaded = self._loader.restore
