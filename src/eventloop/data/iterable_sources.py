"""Sources for other iterables: to resume, their objects are restored and taken batches read again."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch.utils.data import DataLoader

from eventloop.data.map_style import LoaderPasses
from eventloop.data.positions import IterablePosition
from eventloop.data.resumable_sources import Saved, Source
from eventloop.data.sample_order import Order
from eventloop.data.sampling_state import SamplingState, Stateful
from eventloop.data.too_few_batches import USED_UP
from eventloop.errors import TaskError
from eventloop.forms import as_dict, from_dict
from eventloop.object_state.tracked import restored_objects
from eventloop.rng import kept_generators

if TYPE_CHECKING:
    from eventloop.data.loaders import Loader

_ROOT = "dataloader"


@runtime_checkable
class ReadsAhead(Protocol):
    """A data loader that exposes the batches it has read but not yielded, so that they are saved.

    Attributes:
        ahead: these batches, in order. While the loader is iterated over, it may be set to as many
            others.
    """

    ahead: list[Any]


@contextmanager
def restored_loader_state(dataloader: Any) -> Iterator[None]:
    """Restores the generators, samplers and position of a data loader on exit.

    The global generators aren't restored.
    """
    # torchdata's loader would start workers to return its position, so its data set is walked instead.
    is_stateful = isinstance(dataloader, Stateful) and not isinstance(dataloader, DataLoader)
    position = copy.deepcopy(dataloader.state_dict()) if is_stateful else {}
    with restored_objects(dataloader=dataloader):
        yield
    if is_stateful:
        dataloader.load_state_dict(position)


class IterableSource(Source):
    """Any other iterable: to resume, the batches that were taken are read again and dropped.

    The counters of its iterators aren't saved, because there are no methods to get and set them.
    """

    kind = "iterable"
    suits_any_ranks = False
    draws_when_read = True

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader)
        dataloader = loader.dataloader
        self._state = SamplingState({_ROOT: dataloader})
        self._order = Order((), getattr(dataloader, "generator", None), self._state)
        self._passes = LoaderPasses(loader.for_evaluation(), self._order)
        self._num_workers = getattr(dataloader, "num_workers", 0)
        self._first: Any = None
        self._name = f"a {type(getattr(dataloader, 'dataset', dataloader)).__name__}"
        iterators = [path.removeprefix(_ROOT + ".") for path in self._state.iterators]
        iterator_names = ", ".join(f"`{path}`" for path in iterators)
        risk = f" that holds {iterator_names}, whose position isn't saved" if iterator_names else ""
        self.resume_risks = (f"{self._name}{risk}",)

    def _batches(self, epoch: int, num_taken: int | None) -> Iterator[Any]:
        if num_taken is None:
            self._order.start = self._state.state_dict(with_global=True)
            return self._passes.start()
        num_read = 0
        with kept_generators():
            self._state.load_state_dict(self._order.start or {})
            iterator = self._passes.resume()
            for batch in itertools.islice(iterator, num_taken):
                self._first = self._first if num_read else batch
                num_read += 1
        if num_read < num_taken:
            message = (
                f"{self._name} yielded {num_read} batches, of which {num_taken} had been taken"
            )
            raise TaskError(message, fix=USED_UP)
        if num_read:
            warnings.warn(
                f"{num_read} batches were read again to resume in mid-epoch: {self._name} has no "
                "state_dict and load_state_dict to begin at a later batch"
                + self._lost_in_workers(),
                stacklevel=2,
            )
        return iterator

    def state_dict(self, num_taken: int | None) -> dict[str, Any]:
        position = IterablePosition(
            num_workers=self._num_workers,
            start=None if num_taken is None else self._order.start,
            now=self._state.state_dict(with_global=False),
            passes=self._passes.state(),
        )
        return as_dict(position)

    def load_state_dict(self, state: Saved, epoch: int, num_taken: int | None) -> None:
        saved = from_dict(IterablePosition, state)
        self._passes.load(saved.passes)
        if num_taken is None:
            self._state.load_state_dict(saved.now)
            return
        if saved.num_workers != self._num_workers:
            raise TaskError(
                f"the run was stopped in mid-epoch with num_workers={saved.num_workers}, and an "
                f"iterable data set yields other batches with {self._num_workers}",
                fix=f"set num_workers={saved.num_workers} for the train data loader, or resume "
                "from a checkpoint at the end of an epoch",
            )
        self._order.start = None if saved.start is None else dict(saved.start)
        # Loaded now, so that a state that doesn't fit raises before the first batch is needed.
        self._state.load_state_dict(saved.start or {})

    def first(self) -> Any:
        return self._first

    @property
    def ahead(self) -> list[Any]:
        loader = self._dataloader
        return [*loader.ahead] if isinstance(loader, ReadsAhead) else []

    @ahead.setter
    def ahead(self, batches: list[Any]) -> None:
        if isinstance(self._dataloader, ReadsAhead):
            self._dataloader.ahead = batches

    def _lost_in_workers(self) -> str:
        if not self._num_workers:
            return ""
        return "; counters of its copies in worker processes start from zero"
