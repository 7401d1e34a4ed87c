"""Saves and restores plain attributes of trainers and callbacks, such as counters and collections."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Types that a checkpoint stores unchanged; NumPy scalars become Python's.
_PLAIN = (type(None), bool, int, float, str, Tensor)
# Attributes of a trainer that are saved elsewhere, or are data.
_NEVER = {"args", "model", "model_wrapped", "train_dataset", "eval_dataset", "state", "control"}
_MAX_DEPTH = 8


class NotPlainError(TypeError):
    """A value contains something other than numbers, text, tensors and collections of them."""


class Attributes:
    """The plain attributes of an object that have changed since a snapshot.

    Args:
        target: the object: a trainer or a callback.
    """

    def __init__(self, target: object) -> None:
        self._target = target
        self._snapshot = self._encoded()

    def changed(self) -> dict[str, Any]:
        """Returns the attributes that have changed."""
        missing = object()
        return {
            name: value
            for name, value in self._encoded().items()
            if not are_equal(value, self._snapshot.get(name, missing))
        }

    def put(self, changed: Mapping[str, Any]) -> None:
        """Sets changed attributes; existing collections are filled in place."""
        for name, value in changed.items():
            current_value = vars(self._target).get(name)
            vars(self._target)[name] = decoded(value, current_value)

    def _encoded(self) -> dict[str, Any]:
        attributes = {}
        for name, value in vars(self._target).items():
            if name in _NEVER:
                continue
            try:
                attributes[name] = encoded(value)
            except NotPlainError:
                continue
        return attributes


class OtherModels:
    """A trainer's models other than the trained one, such as a reference, saved if they changed.

    Args:
        trainer: the trainer.
    """

    def __init__(self, trainer: Any) -> None:
        trained_models = (trainer.model, trainer.model_wrapped)
        self._models = {
            name: value
            for name, value in vars(trainer).items()
            if isinstance(value, nn.Module)
            and not any(value is trained for trained in trained_models)
        }
        self._sums = {name: _sums(model) for name, model in self._models.items()}

    def changed(self) -> dict[str, Any]:
        """Returns the state dicts of the models that have changed."""
        return {
            name: dict(model.state_dict())
            for name, model in self._models.items()
            if _sums(model) != self._sums[name]
        }

    def put(self, changed: Mapping[str, Any]) -> None:
        """Loads the state dicts of changed models."""
        for name, state in changed.items():
            self._models[name].load_state_dict(state)


def encoded(value: Any, depth: int = 0) -> Any:
    """Returns a copy of a nest in a form that a checkpoint can store.

    Raises:
        NotPlainError: it contains something other than numbers, text, tensors and collections of them.
    """
    if depth > _MAX_DEPTH:
        raise NotPlainError("nested too deep")
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping) and isinstance(value, MutableMapping):
        pairs = [
            [encoded(key, depth + 1), encoded(nested, depth + 1)] for key, nested in value.items()
        ]
        return {"kind": "dict", "items": pairs}
    if type(value) in (list, tuple, deque, set):
        items = [encoded(nested, depth + 1) for nested in value]
        return {"kind": type(value).__name__, "items": items}
    raise NotPlainError(type(value).__name__)


def decoded(value: Any, current_value: Any = None) -> Any:
    """Inverse of `encoded`.

    Args:
        current_value: the attribute's current value. A collection of the same kind is filled in place,
            because other objects may hold it, and its exact class can't be saved.
    """
    if isinstance(value, Tensor) and isinstance(current_value, Tensor):
        return value.to(current_value.device)
    if not isinstance(value, Mapping):
        return value
    if value["kind"] == "dict":
        target = current_value if isinstance(current_value, MutableMapping) else {}
        items = {
            key: decoded(nested, target.get(key)) for key, nested in map(_pair, value["items"])
        }
        target.clear()
        target.update(items)
        return target
    listed = [decoded(nested) for nested in value["items"]]
    if isinstance(current_value, list | deque) and type(current_value).__name__ == value["kind"]:
        current_value.clear()
        current_value.extend(listed)
        return current_value
    return {"list": list, "tuple": tuple, "deque": deque, "set": set}[value["kind"]](listed)


def are_equal(value: Any, other_value: Any) -> bool:
    """Whether two encoded nests are equal."""
    if isinstance(value, Tensor) or isinstance(other_value, Tensor):
        if (
            type(value) is not type(other_value)
            or value.shape != other_value.shape
            or value.dtype != other_value.dtype
        ):
            return False
        return torch.equal(value, other_value)
    if isinstance(value, Mapping) and isinstance(other_value, Mapping):
        return value.keys() == other_value.keys() and all(
            are_equal(value[key], other_value[key]) for key in value
        )
    if (
        isinstance(value, Sequence)
        and isinstance(other_value, Sequence)
        and not isinstance(value, str)
    ):
        alike = type(value) is type(other_value) and len(value) == len(other_value)
        return alike and all(map(are_equal, value, other_value))
    return type(value) is type(other_value) and bool(
        value == other_value or (value != value and other_value != other_value)
    )


def _pair(item: Sequence[Any]) -> tuple[Any, Any]:
    key, value = item
    return decoded(key), value


def _sums(model: nn.Module) -> list[float]:
    """Returns the sum of each tensor; unlike version counters, it detects assignments to `param.data`."""
    sums = [tensor.detach().double().sum() for tensor in model.state_dict().values()]
    return torch.stack(sums).tolist() if sums else []
