"""Plugins that limit batches: the number per epoch and evaluation, or the same few, to overfit."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

from eventloop.data.combined import FirstBatches
from eventloop.hook_markers import hookimpl

if TYPE_CHECKING:
    from eventloop.state import State


class LimitBatches:
    """Ends each epoch of training, and each evaluation, after a number of batches.

    Args:
        train_batches: the number of batches in an epoch of training; None for all.
        eval_batches: the number of batches of each eval data loader; None for all.

    Raises:
        ValueError: a limit is less than 1, or both are None.
    """

    name = "limit-batches"

    def __init__(
        self, *, train_batches: int | None = None, eval_batches: int | None = None
    ) -> None:
        _require_positive("LimitBatches", train_batches=train_batches, eval_batches=eval_batches)
        if train_batches is None and eval_batches is None:
            raise ValueError("LimitBatches() has no effect: set train_batches or eval_batches")
        self.train_batches = train_batches
        self.eval_batches = eval_batches

    @hookimpl(wrapper=True, tryfirst=True)
    def build_train_dataloader(self, state: State) -> Generator[None, Any, Any]:
        dataloader = yield
        return _first(dataloader, self.train_batches)

    @hookimpl(wrapper=True, tryfirst=True)
    def build_eval_dataloaders(self, state: State) -> Generator[None, Mapping[str, Any], Any]:
        dataloaders = yield
        return {name: _first(loader, self.eval_batches) for name, loader in dataloaders.items()}


class Overfit:
    """Trains repeatedly on the same few batches, and evaluates on them.

    The batches are read from the train data loader once, when the trainer is built, so random
    augmentation doesn't change them. The only eval data set is called "overfit": a correct model and
    loss reach the best values of its metrics.

    Args:
        batches: the number of batches.

    Raises:
        ValueError: the number is less than 1.
    """

    name = "overfit"

    def __init__(self, *, batches: int) -> None:
        _require_positive("Overfit", batches=batches)
        self.batches = batches
        self._cached: list[Any] = []

    @hookimpl(wrapper=True, tryfirst=True)
    def build_train_dataloader(self, state: State) -> Generator[None, Any, list[Any]]:
        dataloader = yield
        self._cached = self._cached or list(itertools.islice(dataloader, self.batches))
        return self._cached

    @hookimpl(wrapper=True, tryfirst=True)
    def build_eval_dataloaders(self, state: State) -> Generator[None, Any, dict[str, Any]]:
        """Replaces the task's eval data with the same batches."""
        yield
        return {"overfit": self._cached}


def _first(dataloader: Any, limit: int | None) -> Any:
    if limit is None:
        return dataloader
    return FirstBatches(dataloader, limit)


def _require_positive(owner: str, **counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and (not isinstance(count, int) or count < 1):
            raise ValueError(f"{owner}({name}={count!r}) isn't a number of batches, 1 or more")
