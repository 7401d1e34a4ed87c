"""What an iterable of a user's own is made of: the generators and samplers in it, and their places."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from eventloop.data.sample_order import Stateful, Watched
from eventloop.rng import get_rng_state, is_generator, set_rng_state

_MOST_ENTRIES = 100  # of a sequence or mapping; longer ones are data
_MOST_OBJECTS = 2_000
_LEAVES = (bool, int, float, complex, str, bytes, bytearray, range, type(None), type, ModuleType)
_NOT_DATA = (Tensor, nn.Module, FunctionType)
_STRANGE = ("builtins", "numpy", "threading", "multiprocessing", "logging", "io", "pathlib")


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
        """Returns where all of them stand now."""
        return {
            "generators": {path: get_rng_state(one) for path, one in self._generators.items()},
            "watched": {
                path: copy.deepcopy(one.state_dict()) for path, one in self._watched.items()
            },
        }

    def put(self, standing: Mapping[str, Any]) -> None:
        """Lets all go on from where `standing` found them, those that are there."""
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
    if not isinstance(one, (DataLoader, Dataset, Sampler)) and _is_strange(type(one)):
        return []
    attributes = getattr(one, "__dict__", {})
    # Workers that stay aren't what a loader is made of.
    return [(f".{name}", part) for name, part in attributes.items() if name != "_iterator"]


def _is_short(entries: Any) -> bool:
    return len(entries) <= _MOST_ENTRIES


def _is_strange(kind: type) -> bool:
    root = kind.__module__.partition(".")[0]
    return root in _STRANGE or root == "torch"
