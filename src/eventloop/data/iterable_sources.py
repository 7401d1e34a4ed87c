"""Iterables of a user's own: generators and samplers in them are restored, taken batches read again."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate, default_convert

from eventloop.data.combined import USED_UP, is_map_style
from eventloop.data.map_style import LoaderPasses, with_gathers
from eventloop.data.resumable_sources import Saved, Source
from eventloop.data.sample_order import Order
from eventloop.data.sample_seeds import collate
from eventloop.data.sampler_state import SamplerState, Stateful
from eventloop.data.sharding import copy_with
from eventloop.errors import TaskError
from eventloop.rng import get_rng_state, is_generator, kept_generators, set_rng_state

_MOST_ENTRIES = 100  # of a sequence or mapping; longer ones are data
_MOST_OBJECTS = 2_000
_LEAVES = (bool, int, float, complex, str, bytes, bytearray, range, type(None), type, ModuleType)
_NOT_DATA = (Tensor, nn.Module, FunctionType)
_FOREIGN = ("builtins", "numpy", "threading", "multiprocessing", "logging", "io", "pathlib")


@runtime_checkable
class ReadsAhead(Protocol):
    """A data loader that shows which batches it has read and not yielded, so that they are saved.

    Attributes:
        ahead: these batches, in order; may be replaced by as many others while it is iterated over.
    """

    ahead: list[Any]


class LoaderState:
    """The generators, samplers and stateful data sets that an object holds, by their paths.

    Looks into attributes, sequences and mappings, data loaders and data sets among them.

    Attributes:
        iterators: the paths of iterators, whose positions can't be saved.
    """

    def __init__(self, root: Any) -> None:
        self._generators: dict[str, Any] = {}
        self._samplers: dict[str, SamplerState] = {}
        self.iterators: list[str] = []
        for path, part in _inside(root):
            if is_generator(part):
                self._generators[path] = part
            elif isinstance(part, Sampler) or (
                isinstance(part, Dataset) and isinstance(part, Stateful)
            ):
                self._samplers[path] = SamplerState(part)
            elif isinstance(part, Iterator):
                self.iterators.append(path)

    def state_dict(self) -> dict[str, Any]:
        generators = {path: get_rng_state(one) for path, one in self._generators.items()}
        samplers = {path: copy.deepcopy(one.state_dict()) for path, one in self._samplers.items()}
        return {"generators": generators, "watched": samplers}

    def load_state_dict(self, state: Saved) -> None:
        for path, rng_state in state.get("generators", {}).items():
            if path in self._generators:
                set_rng_state(self._generators[path], rng_state)
        for path, saved in state.get("watched", {}).items():
            if path in self._samplers and saved["kind"] == self._samplers[path].kind:
                self._samplers[path].load_state_dict(saved)


@contextmanager
def restored_loader_state(dataloader: Any) -> Iterator[None]:
    """Leaves the generators, samplers and positions of a data loader as it found them.

    The global generators aren't among them.
    """
    loader_state = LoaderState(dataloader)
    state = loader_state.state_dict()
    samplers = [
        (part, dict(vars(part)))
        for path, part in _inside(dataloader)
        if isinstance(part, Sampler) or (path.endswith("sampler") and hasattr(part, "__dict__"))
    ]
    # torchdata's loader would start workers to return its position; its data set is looked at.
    is_stateful = isinstance(dataloader, Stateful) and not isinstance(dataloader, DataLoader)
    own = copy.deepcopy(dataloader.state_dict()) if is_stateful else {}
    try:
        yield
    finally:
        for sampler, attributes in samplers:
            vars(sampler).update(attributes)
        loader_state.load_state_dict(state)
        if is_stateful:
            dataloader.load_state_dict(own)


def _inside(root: Any) -> Iterator[tuple[str, Any]]:
    """Yields the objects that an object is made of, each once, the nearest first."""
    seen = {id(root)}
    waiting = deque(_parts_of(root))
    while waiting and len(seen) < _MOST_OBJECTS:
        path, part = waiting.popleft()
        if id(part) in seen or isinstance(part, (*_LEAVES, *_NOT_DATA)):
            continue
        seen.add(id(part))
        yield path, part
        waiting.extend((f"{path}{step}", inner) for step, inner in _parts_of(part))


def _parts_of(whole: Any) -> list[tuple[str, Any]]:
    """Returns what an object holds, each with the step to it: `.loaders`, `[0]`."""
    if is_generator(whole):
        return []
    if isinstance(whole, (list, tuple, Mapping)):
        if len(whole) > _MOST_ENTRIES:
            return []
        entries = whole.items() if isinstance(whole, Mapping) else enumerate(whole)
        return [(f"[{key!r}]", part) for key, part in entries]
    root = type(whole).__module__.partition(".")[0]
    if root in {*_FOREIGN, "torch"} and not isinstance(whole, (DataLoader, Dataset, Sampler)):
        return []
    attributes = getattr(whole, "__dict__", {})
    # Workers that persist aren't what a loader is made of.
    return [(f".{name}", part) for name, part in attributes.items() if name != "_iterator"]


def to_evaluate(dataloader: Any) -> Any:
    """Returns a data loader that reads tensors in memory a batch at a time.

    Over an iterable data set, which has no length to compare, one whose collate function can't end
    it. Any other stays as it is.
    """
    if not isinstance(dataloader, DataLoader):
        return dataloader
    if is_map_style(dataloader):
        return with_gathers(dataloader)
    if (collate_fn := dataloader.collate_fn) in (default_collate, default_convert):
        return dataloader
    return copy_with(dataloader, collate_fn=functools.partial(collate, collate_fn))


class IterableSource(Source):
    """Any other iterable: to resume, the batches that were taken are read again and dropped.

    Its own counters aren't saved: it has no methods to get and set them.
    """

    kind = "iterable"
    suits_any_ranks = False
    draws_when_read = True

    def __init__(self, dataloader: Any) -> None:
        super().__init__(dataloader)
        self._state = LoaderState(dataloader)
        self._order = Order((), getattr(dataloader, "generator", None))
        self._passes = LoaderPasses(to_evaluate(dataloader), self._order)
        self._num_workers = getattr(dataloader, "num_workers", 0)
        self._data = getattr(dataloader, "dataset", dataloader)
        self._built = _counters_of(self._data)
        self._lost: Saved = {}
        self._first: Any = None
        self._name = f"a {type(self._data).__name__}"
        held = ", ".join(f"`{path.lstrip('.')}`" for path in self._state.iterators)
        why = f" that holds {held}, whose position isn't saved" if held else ""
        self.resume_risks = (f"{self._name}{why}",)

    def _batches(self, epoch: int, num_taken: int | None) -> Iterator[Any]:
        if num_taken is None:
            self._order.start = self._rng_state(with_global=True)
            return self._passes.start()
        num_read = 0
        with kept_generators():
            self._restore(self._order.start or {})
            iterator = self._passes.resume()
            for batch in itertools.islice(iterator, num_taken):
                self._first = self._first if num_read else batch
                num_read += 1
        if num_read < num_taken:
            what = f"{self._name} yielded {num_read} batches, of which {num_taken} had been taken"
            raise TaskError(what, fix=USED_UP)
        if num_read or self._lost:
            warnings.warn(
                f"{num_read} batches were read again to resume in mid-epoch: {self._name} can't "
                f"begin at a later one, and {self._what_restarts()}",
                stacklevel=2,
            )
        return iterator

    def state_dict(self, num_taken: int | None) -> dict[str, Any]:
        return {
            "num_workers": self._num_workers,
            "start": None if num_taken is None else self._order.start,
            "now": self._rng_state(with_global=False),
            "turns": self._passes.state_dict(),
            "counted": dict(_counters_of(self._data).items() - self._built.items()),
        }

    def load_state_dict(self, state: Saved, epoch: int, num_taken: int | None) -> None:
        self._passes.load_state_dict(state["turns"])
        self._lost = state.get("counted", {})
        if num_taken is None:
            self._restore(state["now"])
            if self._lost:
                warnings.warn(
                    f"{self._name} can't resume exactly: {self._what_restarts()}", stacklevel=2
                )
            return
        if state["num_workers"] != self._num_workers:
            raise TaskError(
                f"the run was stopped in mid-epoch with num_workers={state['num_workers']}, and an "
                f"iterable data set gives other batches with {self._num_workers}",
                fix=f"set num_workers={state['num_workers']} for the train data loader, or resume "
                "from a checkpoint at the end of an epoch",
            )
        self._order.start = state["start"]
        self._restore(state["start"] or {})  # refused now, not when the first batch is wanted

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

    def _rng_state(self, *, with_global: bool) -> dict[str, Any]:
        states = self._order.rng_state(with_global=with_global)
        return {**states, "places": self._state.state_dict()}

    def _restore(self, state: Saved) -> None:
        self._order.set_rng_state(state)
        self._state.load_state_dict(state.get("places", {}))

    def _what_restarts(self) -> str:
        """Says what isn't saved; by name if it was seen to change."""
        counters = ", ".join(f"{name}={value!r}" for name, value in sorted(self._lost.items()))
        what = counters or "its epochs, for instance"
        return (
            f"what it counts itself ({what}) starts anew; it is kept where the data has state_dict "
            "and load_state_dict"
        )


def _counters_of(data: Any) -> dict[str, Any]:
    """Returns the attributes that may be counters: plain numbers and texts."""
    attributes = getattr(data, "__dict__", {}).items()
    return {name: value for name, value in attributes if type(value) in (bool, int, float, str)}
