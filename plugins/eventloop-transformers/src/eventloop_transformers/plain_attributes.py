"""Plain attributes in which trainers and callbacks count and collect, saved and restored."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Kept as they are by a checkpoint; NumPy's scalars become Python's.
_PLAIN = (type(None), bool, int, float, str, Tensor)
# Of a trainer: what it is made of, and data.
_NEVER = {"args", "model", "model_wrapped", "train_dataset", "eval_dataset", "state", "control"}
_MAX_DEPTH = 8


class NotPlainError(TypeError):
    """A value that isn't made of numbers, text, tensors and collections of them."""


class Attributes:
    """The plain attributes of an object that have changed since they were noted.

    Args:
        one: the object; a trainer, or a callback.
    """

    def __init__(self, one: object) -> None:
        self._one = one
        self._noted = self._found()

    def changed(self) -> dict[str, Any]:
        """Returns those that aren't as they were."""
        missing = object()
        return {
            name: value
            for name, value in self._found().items()
            if not are_equal(value, self._noted.get(name, missing))
        }

    def put(self, changed: Mapping[str, Any]) -> None:
        """Sets what `changed` returned; collections that are there get the items."""
        for name, value in changed.items():
            held = vars(self._one).get(name)
            vars(self._one)[name] = decoded(value, held)

    def _found(self) -> dict[str, Any]:
        found = {}
        for name, value in vars(self._one).items():
            if name in _NEVER:
                continue
            try:
                found[name] = encoded(value)
            except NotPlainError:
                continue
        return found


class OtherModels:
    """A trainer's models other than the trained one, such as a reference, saved if they changed.

    Args:
        trainer: whose attributes they are.
    """

    def __init__(self, trainer: Any) -> None:
        own = (trainer.model, trainer.model_wrapped)
        self._models = {
            name: one
            for name, one in vars(trainer).items()
            if isinstance(one, nn.Module) and not any(one is other for other in own)
        }
        self._noted = {name: _sums(one) for name, one in self._models.items()}

    def changed(self) -> dict[str, Any]:
        """Returns the state dicts of those that aren't as they were."""
        return {
            name: dict(one.state_dict())
            for name, one in self._models.items()
            if _sums(one) != self._noted[name]
        }

    def put(self, changed: Mapping[str, Any]) -> None:
        """Loads what `changed` returned."""
        for name, state in changed.items():
            self._models[name].load_state_dict(state)


def encoded(value: Any, depth: int = 0) -> Any:
    """Returns a copy of a nest as a checkpoint can hold it.

    Raises:
        NotPlainError: it holds something else than numbers, text, tensors and collections of them.
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
        pairs = [[encoded(key, depth + 1), encoded(one, depth + 1)] for key, one in value.items()]
        return {"kind": "dict", "items": pairs}
    if type(value) in (list, tuple, deque, set):
        items = [encoded(one, depth + 1) for one in value]
        return {"kind": type(value).__name__, "items": items}
    raise NotPlainError(type(value).__name__)


def decoded(value: Any, held: Any = None) -> Any:
    """Returns what was encoded.

    Args:
        held: what is there now; a collection of the same kind is filled and returned, since its kind,
            and who holds it, can't be saved.
    """
    if isinstance(value, Tensor) and isinstance(held, Tensor):
        return value.to(held.device)
    if not isinstance(value, Mapping):
        return value
    if value["kind"] == "dict":
        into = held if isinstance(held, MutableMapping) else {}
        items = {key: decoded(one, into.get(key)) for key, one in map(_pair, value["items"])}
        into.clear()
        into.update(items)
        return into
    listed = [decoded(one) for one in value["items"]]
    if isinstance(held, list | deque) and type(held).__name__ == value["kind"]:
        held.clear()
        held.extend(listed)
        return held
    return {"list": list, "tuple": tuple, "deque": deque, "set": set}[value["kind"]](listed)


def are_equal(one: Any, other: Any) -> bool:
    """Whether two encoded nests hold the same."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        if type(one) is not type(other) or one.shape != other.shape or one.dtype != other.dtype:
            return False
        return torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(are_equal(one[key], other[key]) for key in one)
    if isinstance(one, Sequence) and isinstance(other, Sequence) and not isinstance(one, str):
        alike = type(one) is type(other) and len(one) == len(other)
        return alike and all(map(are_equal, one, other))
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


def _pair(item: Sequence[Any]) -> tuple[Any, Any]:
    key, value = item
    return decoded(key), value


def _sums(model: nn.Module) -> list[float]:
    """Returns the sum of each tensor, which an assignment to `param.data` changes, too."""
    sums = [one.detach().double().sum() for one in model.state_dict().values()]
    return torch.stack(sums).tolist() if sums else []
