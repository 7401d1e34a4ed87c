"""Raises an error if torch would broadcast outputs along the samples of targets, or vice versa."""

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
# The beginning of torch's warning in mse_loss, l1_loss, smooth_l1_loss and huber_loss. It is a plain
# UserWarning, so it can only be recognized by its text (torch 2.13).
_BEGINNING = "Using a target size"
_BROADCAST = (
    "received shapes that would be broadcast, so that each output is compared with all targets"
)
_ORIGINS = _OUTPUTS, _TARGETS = frozenset(["outputs"]), frozenset(["targets"])
_FIX = (
    "give both the same shape, for example `outputs.squeeze(1)` or `targets.unsqueeze(1)`; if "
    "broadcasting is intended, use `torch.broadcast_tensors(outputs, targets)`"
)


@contextmanager
def shapes_must_match() -> Iterator[None]:
    """Makes a loss of outputs (16, 1) and targets (16,) an error, within the block.

    torch would broadcast both to (16, 16) and compare each output with all targets.

    Raises:
        TaskError: a loss function of torch warned about shapes that differ.
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


def watched_once(function: Callable[[Any, Any], T], subject: str) -> Callable[[Any, Any], T]:
    """Returns a function of outputs and targets whose first call is checked for broadcasting.

    Finds expressions that torch doesn't warn about: `((outputs - targets) ** 2).mean()`. Compiled calls
    aren't checked.

    Args:
        subject: the name of the function in messages: "the loss".

    Raises:
        TaskError: raised by the first call, if an operation broadcasts a tensor computed from only the
            outputs along the samples of a tensor computed from only the targets, or vice versa.
    """
    was_called = False

    def watched(outputs: Any, targets: Any) -> T:
        nonlocal was_called
        if torch.compiler.is_compiling() or was_called:
            return function(outputs, targets)
        was_called = True
        with _OriginTracker(subject, outputs, targets):
            return function(outputs, targets)

    return watched


class _OriginTracker(TorchFunctionMode):
    """Tracks which tensors are computed from the outputs, and which from the targets.

    Args:
        subject: the name of the function that is checked, for messages.
        outputs, targets: nested tensors.
    """

    def __init__(self, subject: str, outputs: Any, targets: Any) -> None:
        super().__init__()
        self._subject = subject
        # By id. The tensors are stored, too, so that no id is used again for another tensor.
        self._origins: dict[int, tuple[Tensor, frozenset[str]]] = {}
        for nest, origin in zip((outputs, targets), _ORIGINS, strict=True):
            map_tensors(functools.partial(self._note, origin), nest)

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keyword_args = kwargs or {}
        result = function(*args, **keyword_args)
        tensors = [arg for arg in (*args, *keyword_args.values()) if isinstance(arg, Tensor)]
        origins = [
            self._origins[id(tensor)][1] for tensor in tensors if id(tensor) in self._origins
        ]
        if isinstance(result, Tensor) and origins:
            if len(tensors) == 2 and set(origins) == set(_ORIGINS):
                left, right = tensors
                _require_aligned(self._subject, left, right, result)
            all_origins: frozenset[str] = frozenset()  # torch 2.10 can't compile `frozenset[str]()`
            self._note(all_origins.union(*origins), result)
        return result

    def _note(self, origin: frozenset[str], tensor: Any) -> None:
        if isinstance(tensor, Tensor):
            self._origins[id(tensor)] = tensor, origin


def _require_aligned(subject: str, left: Tensor, right: Tensor, result: Tensor) -> None:
    """Raises TaskError if samples weren't compared in pairs: (16, 1) and (16,) became (16, 16)."""
    shapes = [tuple(left.shape), tuple(right.shape)]
    short, long = sorted(shapes, key=len)
    # With equal numbers of dimensions, (16, 1) and (1, 16), the broadcast is intended.
    if not short or len(short) == len(long) or short[0] != long[0] or short[0] == 1:
        return
    if result.numel() > max(left.numel(), right.numel()):
        raise TaskError(
            f"{subject} {_BROADCAST}: {shapes[0]} and {shapes[1]} became {tuple(result.shape)}",
            fix=_FIX,
        )
