"""Attributes of objects that change in training but aren't in a state dict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from composer.core import Time, Timestamp
from torch import Tensor

from eventloop_composer.encoded import decoded, encoded

_NUMBERS = (type(None), int, float, str)


class Attributes:
    """Finds the attributes that have changed since a snapshot, and restores them.

    Only plain values, tensors, and times of Composer are considered.

    Args:
        objects: returns the objects to watch, by name.
        with_numbers: whether to include numbers and texts: those of a callback may be wall-clock times.
    """

    def __init__(
        self, objects: Callable[[], Mapping[str, object]], *, with_numbers: bool = True
    ) -> None:
        self._objects = objects
        self._kinds = (bool, Tensor, Time, Timestamp, *(_NUMBERS if with_numbers else ()))
        self._before: Mapping[str, Mapping[str, Any]] = {}
        self.note()

    def note(self) -> None:
        """Takes a snapshot of the attributes."""
        self._snapshot = {
            name: {key: _copied(value) for key, value in attributes.items()}
            for name, attributes in self._attributes().items()
        }

    def changed(self) -> dict[str, dict[str, Any]]:
        """Returns the attributes that differ from the snapshot, by object; all attributes of a new object."""
        changed = {}
        for name, attributes in self._attributes().items():
            old_attributes = self._snapshot.get(name, {})
            new = {
                key: encoded(value)
                for key, value in attributes.items()
                if key not in old_attributes or not _are_same(value, old_attributes[key])
            }
            if new:
                changed[name] = new
        return changed

    def put(self, changed: Mapping[str, Mapping[str, Any]]) -> None:
        """Sets the attributes that `changed` returned, in the objects that still exist."""
        for name, target in self._objects().items():
            for key, value in changed.get(name, {}).items():
                current_value = vars(target).get(key)
                value = decoded(value)
                if isinstance(value, Tensor) and isinstance(current_value, Tensor):
                    value = value.to(current_value.device)
                vars(target)[key] = value

    def _attributes(self) -> dict[str, dict[str, Any]]:
        return {
            name: {
                key: value
                for key, value in vars(watched).items()
                if isinstance(value, self._kinds) and key != "training"
            }
            for name, watched in self._objects().items()
        }


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _are_same(value: Any, other_value: Any) -> bool:
    if isinstance(value, Tensor) or isinstance(other_value, Tensor):
        if type(value) is not type(other_value) or value.shape != other_value.shape:
            return False
        return torch.equal(value, other_value)
    return type(value) is type(other_value) and bool(value == other_value)
