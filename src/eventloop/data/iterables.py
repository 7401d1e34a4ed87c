"""Iterables of a user's own: generators and samplers in them are put back, what was taken is read again."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate, default_convert

from eventloop.data.combine import is_map_style, known_length
from eventloop.data.map_style import Turns, copy_with, with_gathers
from eventloop.data.sample_order import Order, Stateful, Watched
from eventloop.data.sample_seeds import collated
from eventloop.errors import TaskError
from eventloop.rng import KeptGenerators, get_rng_state, is_generator, set_rng_state

_MOST_ENTRIES = 100  # of a sequence or mapping; longer ones are data
_MOST_OBJECTS = 2_000
_LEAVES = (bool, int, float, complex, str, bytes, bytearray, range, type(None), type, ModuleType)
_NOT_DATA = (Tensor, nn.Module, FunctionType)
_STRANGE = ("builtins", "numpy", "threading", "multiprocessing", "logging", "io", "pathlib")
Saved = Mapping[str, Any]


class Places:
    """The generators, samplers and data with a state that an object holds, by their paths.

    Looks into attributes, sequences and mappings, data loaders and data sets among them.

    Args:
        root: the object, which isn't among them itself.

    Attributes:
        iterators: the paths of iterators, whose places can't be kept.
    """

    def __init__(self, root: Any) -> None:
        self._generators: dict[str, Any] = {}
        self._watched: dict[str, Watched] = {}
        self.iterators: list[str] = []
        for path, one in _inside(root):
            if is_generator(one):
                self._generators[path] = one
            elif isinstance(one, Sampler) or (
                isinstance(one, Dataset) and isinstance(one, Stateful)
            ):
                self._watched[path] = Watched(one)
            elif isinstance(one, Iterator):
                self.iterators.append(path)

    def standing(self) -> dict[str, Any]:
        return {
            "generators": {path: get_rng_state(one) for path, one in self._generators.items()},
            "watched": {
                path: copy.deepcopy(one.state_dict()) for path, one in self._watched.items()
            },
        }

    def put(self, standing: Mapping[str, Any]) -> None:
        for path, one in standing.get("generators", {}).items():
            if path in self._generators:
                set_rng_state(self._generators[path], one)
        for path, one in standing.get("watched", {}).items():
            if path in self._watched and one["kind"] == self._watched[path].kind:
                self._watched[path].load_state_dict(one)


@contextmanager
def kept_places(dataloader: Any) -> Iterator[None]:
    """Leaves the generators, samplers and positions of a data loader as it found them.

    The global generators aren't among them.
    """
    places = Places(dataloader)
    standing = places.standing()
    samplers = [
        (one, dict(vars(one))) for _, one in _inside(dataloader) if isinstance(one, Sampler)
    ]
    # torchdata's loader would start workers to say where it is; its data set is looked at.
    is_stateful = isinstance(dataloader, Stateful) and not isinstance(dataloader, DataLoader)
    own = copy.deepcopy(dataloader.state_dict()) if is_stateful else {}
    try:
        yield
    finally:
        for sampler, attributes in samplers:
            vars(sampler).update(attributes)
        places.put(standing)
        if is_stateful:
            dataloader.load_state_dict(own)


def _inside(root: Any) -> Iterator[tuple[str, Any]]:
    """Yields the objects that an object is made of, each once, the nearest first."""
    seen = {id(root)}
    waiting = deque(_parts_of(root))
    while waiting and len(seen) < _MOST_OBJECTS:
        path, one = waiting.popleft()
        if id(one) in seen or isinstance(one, (*_LEAVES, *_NOT_DATA)):
            continue
        seen.add(id(one))
        yield path, one
        waiting.extend((f"{path}{step}", part) for step, part in _parts_of(one))


def _parts_of(one: Any) -> list[tuple[str, Any]]:
    """Returns what an object holds, each with the step to it: `.loaders`, `[0]`."""
    if is_generator(one):
        return []
    if isinstance(one, (list, tuple)):
        return [(f"[{idx}]", part) for idx, part in enumerate(one)] if _is_short(one) else []
    if isinstance(one, Mapping):
        return [(f"[{key!r}]", part) for key, part in one.items()] if _is_short(one) else []
    root = type(one).__module__.partition(".")[0]
    if root in {*_STRANGE, "torch"} and not isinstance(one, (DataLoader, Dataset, Sampler)):
        return []
    attributes = getattr(one, "__dict__", {})
    # Workers that stay aren't what a loader is made of.
    return [(f".{name}", part) for name, part in attributes.items() if name != "_iterator"]


def _is_short(entries: Any) -> bool:
    return len(entries) <= _MOST_ENTRIES


def to_evaluate(dataloader: Any) -> Any:
    """Returns a data loader as one that reads tensors in memory a batch at a time.

    Over an iterable data set, which has no length to compare, as one that its collate function can't
    end. Any other stays as it is.
    """
    if not isinstance(dataloader, DataLoader):
        return dataloader
    if is_map_style(dataloader):
        return with_gathers(dataloader)
    if (collate_fn := dataloader.collate_fn) in (default_collate, default_convert):
        return dataloader
    return copy_with(dataloader, collate_fn=functools.partial(collated, collate_fn))


class ReadAgain:
    """Any other iterable: what was taken is read once more, and dropped.

    What it counts itself isn't kept: it has no method that would say so, or take it back.

    Args:
        dataloader: the iterable.
    """

    kind = "iterable"
    suits_any_ranks, has_first = False, True
    even_sizes = None

    def __init__(self, dataloader: Any) -> None:
        self._dataloader = dataloader
        self._places = Places(dataloader)
        self._order = Order((), getattr(dataloader, "generator", None))
        self._turns = Turns(to_evaluate(dataloader), self._order)
        self._num_workers = getattr(dataloader, "num_workers", 0)
        self._counting = getattr(dataloader, "dataset", dataloader)
        self._built = _counts_of(self._counting)
        self._lost: Mapping[str, Any] = {}
        self._num_taken = 0
        self._first: Any = None

    @property
    def num_batches(self) -> int | None:
        return known_length(self._dataloader)

    def start(self, epoch: int) -> Iterator[Any]:
        self._order.start = self._standing(shared=True)
        return self._turns.begin()

    def look_ahead(self, num_taken: int) -> None:
        pass

    def state_dict(self, num_taken: int | None) -> dict[str, Any]:
        return {
            "num_workers": self._num_workers,
            "start": None if num_taken is None else self._order.start,
            "now": self._standing(shared=False),
            "turns": self._turns.state_dict(),
            "counted": dict(_counts_of(self._counting).items() - self._built.items()),
        }

    def load(self, saved: Saved, epoch: int, num_taken: int | None) -> None:
        self._turns.load_state_dict(saved["turns"])
        self._lost = saved.get("counted", {})
        if num_taken is None:
            self._put(saved["now"])
            if self._lost:
                warnings.warn(f"{self._name} doesn't go on: {self._anew()}", stacklevel=2)
            return
        if saved["num_workers"] != self._num_workers:
            raise TaskError(
                f"the run was stopped in mid-epoch with num_workers={saved['num_workers']}, and an "
                f"iterable data set gives other batches with {self._num_workers}",
                fix=f"set num_workers={saved['num_workers']} for the train data loader, or go on "
                "from a checkpoint at the end of an epoch",
            )
        self._order.start, self._num_taken = saved["start"], num_taken
        self._put(saved["start"] or {})  # when it is wanted it would be too late to refuse it

    def rest(self) -> Iterator[Any]:
        kept = KeptGenerators()
        self._put(self._order.start or {})
        iterator = self._turns.go_on()
        num_read = 0
        for batch in itertools.islice(iterator, self._num_taken):
            self._first = self._first if num_read else batch
            num_read += 1
        kept.put_back()
        if not num_read and not self._lost:
            return iterator
        warnings.warn(
            f"{num_read} batches were read once more to go on in mid-epoch: {self._name} can't "
            f"begin at a later one, and {self._anew()}",
            stacklevel=2,
        )
        return iterator

    def first(self) -> Any:
        return self._first

    @property
    def doubts(self) -> tuple[str, ...]:
        held = ", ".join(f"`{path.lstrip('.')}`" for path in self._places.iterators)
        why = f" that holds {held}, whose place isn't kept" if held else ""
        return (f"{self._name}{why}",)

    def _standing(self, *, shared: bool) -> dict[str, Any]:
        return {**self._order.standing(shared=shared), "places": self._places.standing()}

    def _put(self, standing: Saved) -> None:
        self._order.put(standing)
        self._places.put(standing.get("places", {}))

    @property
    def _name(self) -> str:
        return f"a {type(self._counting).__name__}"

    def _anew(self) -> str:
        """Says what isn't kept; by name where it was seen to change."""
        counted = ", ".join(f"{name}={value!r}" for name, value in sorted(self._lost.items()))
        what = counted or "its epochs, for instance"
        return (
            f"what it counts itself ({what}) starts anew; it is kept where the data has state_dict "
            "and load_state_dict"
        )


def _counts_of(data: Any) -> dict[str, Any]:
    """Returns the attributes that may be counts: plain numbers and texts."""
    attributes = getattr(data, "__dict__", {}).items()
    return {name: one for name, one in attributes if type(one) in (bool, int, float, str)}
