"""Shapes of outputs and targets: refused where torch would broadcast one along the samples of the other."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from eventloop.data.batches import map_tensors
from eventloop.errors import TaskError

T = TypeVar("T")
# How torch's warning begins in mse_loss, l1_loss, smooth_l1_loss and huber_loss (2.13); it has no
# category of its own.
_BEGINNING = "Using a target size"
_BROADCAST = (
    "was given shapes that differ and would be broadcast, each output compared with all targets"
)
_ORIGINS = _OUTPUTS, _TARGETS = frozenset(["outputs"]), frozenset(["targets"])
_FIX = (
    "give both one shape, `outputs.squeeze(1)` or `targets.unsqueeze(1)` say; where broadcasting is "
    "meant, `torch.broadcast_tensors(outputs, targets)`"
)


@contextmanager
def shapes_must_match() -> Iterator[None]:
    """Has a loss of outputs (16, 1) and targets (16,) be an error wherever it is computed.

    Broadcast to (16, 16), each output would be compared with all targets.

    Raises:
        TaskError: the shapes differ.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", _BEGINNING, UserWarning)
        try:
            yield
        except UserWarning as warning:
            sentence, *_ = str(warning).partition("This will likely")
            if not sentence.startswith(_BEGINNING):
                raise
            error = TaskError(f"the loss {_BROADCAST}: {sentence.strip()}", fix=_FIX)
            for note in getattr(warning, "__notes__", ()):
                error.add_note(note)
            raise error from warning


def watched_once(function: Callable[[Any, Any], T], what: str) -> Callable[[Any, Any], T]:
    """Returns a function of outputs and targets whose first call is watched for such shapes.

    For what torch doesn't warn of: `((outputs - targets) ** 2).mean()`. What is compiled isn't
    watched.

    Args:
        what: the function is, for messages: "the loss".

    Raises:
        TaskError: by the first call: an operation of what comes of the outputs alone and what
            comes of the targets alone has broadcast the one along the samples of the other.
    """
    is_seen = False

    def watched(outputs: Any, targets: Any) -> T:
        nonlocal is_seen
        if torch.compiler.is_compiling() or is_seen:
            return function(outputs, targets)
        is_seen = True
        with _Watch(what, outputs, targets):
            return function(outputs, targets)

    return watched


class _Watch(TorchFunctionMode):
    """Follows what comes of outputs and what comes of targets, through the functions of torch.

    Args:
        what: the function is that is watched.
        outputs, targets: nests of tensors.
    """

    def __init__(self, what: str, outputs: Any, targets: Any) -> None:
        super().__init__()
        self._what = what
        # By identity, which lasts as long as the tensor is held.
        self._known: dict[int, tuple[Tensor, frozenset[str]]] = {}
        for nest, origin in zip((outputs, targets), _ORIGINS, strict=True):
            map_tensors(functools.partial(self._note, origin), nest)

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        result = function(*args, **named)
        tensors = [one for one in (*args, *named.values()) if isinstance(one, Tensor)]
        origins = [self._known[id(one)][1] for one in tensors if id(one) in self._known]
        if isinstance(result, Tensor) and origins:
            if len(tensors) == 2 and set(origins) == set(_ORIGINS):
                one, other = tensors
                _require_aligned(self._what, one, other, result)
            everything: frozenset[str] = frozenset()  # torch 2.10 compiles no `frozenset[str]()`
            self._note(everything.union(*origins), result)
        return result

    def _note(self, origin: frozenset[str], tensor: Any) -> None:
        if isinstance(tensor, Tensor):
            self._known[id(tensor)] = tensor, origin


def _require_aligned(what: str, one: Tensor, other: Tensor, result: Tensor) -> None:
    """Raises TaskError if samples weren't compared one by one: (16, 1) and (16,) became (16, 16)."""
    shapes = [tuple(one.shape), tuple(other.shape)]
    few, many = sorted(shapes, key=len)
    # Of as many dimensions, it was written so: (16, 1) against (1, 16).
    if not few or len(few) == len(many) or few[0] != many[0] or few[0] == 1:
        return
    if result.numel() > max(one.numel(), other.numel()):
        raise TaskError(
            f"{what} {_BROADCAST}: {shapes[0]} and {shapes[1]} became {tuple(result.shape)}",
            fix=_FIX,
        )
