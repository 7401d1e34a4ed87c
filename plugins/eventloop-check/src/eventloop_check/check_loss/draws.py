"""Random numbers in a forward pass: dropout is switched off, other draws are noted.

Batches that are cut or ordered differently draw other numbers for the same sample, so that their losses
can't be compared.
"""

from __future__ import annotations

import inspect
import os
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import eventloop

# Names of torch's functions, those in place included.
_DROPOUTS = {
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "dropout_", "alpha_dropout"),
    *("alpha_dropout_", "feature_dropout", "feature_dropout_"),
    *("feature_alpha_dropout", "feature_alpha_dropout_"),
}
_DRAWS = {
    *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm"),
    *("normal", "normal_", "uniform_", "bernoulli", "bernoulli_", "multinomial", "random_"),
    *("exponential_", "geometric_", "cauchy_", "log_normal_", "poisson", "binomial"),
    *("rrelu", "rrelu_", "gumbel_softmax"),
}
# Of calls that drop out beside other things: the name and the place of the probability.
_WITH_DROPOUT: dict[Any, tuple[str, int]] = {
    functional.scaled_dot_product_attention: ("dropout_p", 4),
    functional.multi_head_attention_forward: ("dropout_p", 10),
}
_LIBRARIES = tuple(
    f"{Path(one).parent}{os.sep}" for one in (torch.__file__, eventloop.__file__, __file__)
)


class Draws(TorchFunctionMode):
    """Switches dropout off and notes what else draws random numbers, inside its context.

    Args:
        is_other: whether each draw is replaced by the one after it.

    Attributes:
        dropouts: where dropout would have been, in order of the first call.
        found: what drew, and where.
    """

    def __init__(self, *, is_other: bool = False) -> None:
        super().__init__()
        self.is_other = is_other
        self.dropouts: dict[str, None] = {}
        self.found: dict[str, None] = {}
        self._before: list[Any] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _DROPOUTS:
            if _is_on(args, given):
                self.dropouts.setdefault(_place())
            return args[0] if args else given["input"]
        if func in _WITH_DROPOUT:
            key, idx = _WITH_DROPOUT[func]
            p = args[idx] if len(args) > idx else given.get(key, 0.0)
            if p and given.get("training", True):
                self.dropouts.setdefault(_place())
            if len(args) > idx:
                args = (*args[:idx], 0.0, *args[idx + 1 :])
            else:
                given[key] = 0.0
        elif name in _DRAWS:
            self.found.setdefault(f"torch's {name} at {_place()}")
            if self.is_other:
                func(*args, **given)
        return func(*args, **given)

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        if self.is_other:
            torch.manual_seed(1)
            random.seed(1)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(1)
        self._before = _generators()
        return self

    def __exit__(self, *failure: object) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        names = ("torch's generator", "Python's random", "numpy.random")
        moved = [
            name
            for name, before, after in zip(names, self._before, _generators(), strict=False)
            if before != after
        ]
        for name in moved if not self.found else moved[1:]:
            self.found.setdefault(f"{name}, which the passes move")


def switch_off_recurrent_dropout(model: nn.Module) -> list[str]:
    """Sets the dropout of recurrent layers to 0, in place: they call no function of dropout.

    Returns:
        The names of the layers that had some.
    """
    found = [
        (name, one)
        for name, one in model.named_modules()
        if isinstance(one, nn.RNNBase) and one.dropout
    ]
    for _, layer in found:
        layer.dropout = 0.0
    return [name for name, _ in found]


def _is_on(args: tuple[Any, ...], given: Mapping[str, Any]) -> bool:
    p = args[1] if len(args) > 1 else given.get("p", 0.5)
    training = args[2] if len(args) > 2 else given.get("training", given.get("train", True))
    return bool(p and training)


def _generators() -> list[Any]:
    """Returns the state of each global generator."""
    states = [torch.get_rng_state().tolist(), random.getstate()]
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states.append((kind, keys.tolist(), *rest))
    return states


def _is_library(frame: FrameType) -> bool:
    """Whether a frame is in torch, eventloop, or the pretend device, which stands in for torch."""
    module = str(frame.f_globals.get("__name__", ""))
    is_pretend = module.startswith("eventloop_testing.pretend.")
    return is_pretend or frame.f_code.co_filename.startswith(_LIBRARIES)


def _place() -> str:
    """Returns the line of the user's that calls, for a message."""
    frame = inspect.currentframe()
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    if frame is None:
        return "an unknown line"
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
