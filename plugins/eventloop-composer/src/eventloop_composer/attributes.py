"""Attributes of objects that change in training, where no state dict has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from composer.core import Time, Timestamp
from torch import Tensor

from eventloop_composer.encoded import decoded, encoded

_NUMBERS = (type(None), int, float, str)


class Attributes:
    """Finds the attributes that have changed since they were noted, and puts them back.

    Values alone: tensors, times of Composer's, truth values, and plain ones.

    Args:
        objects: gives those that are looked at, by name.
        with_numbers: whether numbers and text count: those of a callback may be a time of the day.
    """

    def __init__(
        self, objects: Callable[[], Mapping[str, object]], *, with_numbers: bool = True
    ) -> None:
        self._objects = objects
        self._kinds = (bool, Tensor, Time, Timestamp, *(_NUMBERS if with_numbers else ()))
        self._before: Mapping[str, Mapping[str, Any]] = {}
        self.note()

    def note(self) -> None:
        """Notes how they are now."""
        self._before = {
            name: {key: _copied(value) for key, value in found.items()}
            for name, found in self._found().items()
        }

    def changed(self) -> dict[str, dict[str, Any]]:
        """Returns what isn't as it was noted, by object; all of an object that is new."""
        changed = {}
        for name, found in self._found().items():
            before = self._before.get(name, {})
            new = {
                key: encoded(value)
                for key, value in found.items()
                if key not in before or not _are_same(value, before[key])
            }
            if new:
                changed[name] = new
        return changed

    def put(self, changed: Mapping[str, Mapping[str, Any]]) -> None:
        """Sets what `changed` returned, in those objects that are there."""
        for name, one in self._objects().items():
            for key, value in changed.get(name, {}).items():
                held = vars(one).get(key)
                value = decoded(value)
                if isinstance(value, Tensor) and isinstance(held, Tensor):
                    value = value.to(held.device)
                vars(one)[key] = value

    def _found(self) -> dict[str, dict[str, Any]]:
        return {
            name: {
                key: value
                for key, value in vars(one).items()
                if isinstance(value, self._kinds) and key != "training"
            }
            for name, one in self._objects().items()
        }


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        if type(one) is not type(other) or one.shape != other.shape:
            return False
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
