"""Random numbers in a forward pass: dropout is switched off, other draws are recorded.

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
# Functions with a dropout argument: the argument's name and position.
_WITH_DROPOUT: dict[Any, tuple[str, int]] = {
    functional.scaled_dot_product_attention: ("dropout_p", 4),
    functional.multi_head_attention_forward: ("dropout_p", 10),
}
_LIBRARIES = tuple(
    f"{Path(path).parent}{os.sep}" for path in (torch.__file__, eventloop.__file__, __file__)
)


class Draws(TorchFunctionMode):
    """Switches dropout off and records other random draws, inside its context.

    Args:
        is_other: whether to change the random numbers: by another seed and an extra draw before each.

    Attributes:
        dropouts: lines at which dropout was switched off, in the order of the first calls.
        found: descriptions of the draws, with their lines.
    """

    def __init__(self, *, is_other: bool = False) -> None:
        super().__init__()
        self.is_other = is_other
        self.dropouts: dict[str, None] = {}
        self.found: dict[str, None] = {}
        self._states_before: list[Any] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _DROPOUTS:
            if _is_on(args, options):
                self.dropouts.setdefault(_place())
            return args[0] if args else options["input"]
        if func in _WITH_DROPOUT:
            key, idx = _WITH_DROPOUT[func]
            p = args[idx] if len(args) > idx else options.get(key, 0.0)
            if p and options.get("training", True):
                self.dropouts.setdefault(_place())
            if len(args) > idx:
                args = (*args[:idx], 0.0, *args[idx + 1 :])
            else:
                options[key] = 0.0
        elif name in _DRAWS:
            self.found.setdefault(f"torch's {name} at {_place()}")
            if self.is_other:
                func(*args, **options)
        return func(*args, **options)

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        if self.is_other:
            torch.manual_seed(1)
            random.seed(1)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(1)
        self._states_before = _generators()
        return self

    def __exit__(self, *failure: object) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        names = ("torch's generator", "Python's random", "numpy.random")
        moved = [
            name
            for name, state_before, state_after in zip(
                names, self._states_before, _generators(), strict=False
            )
            if state_before != state_after
        ]
        # Draws of torch's functions are recorded already, with their lines.
        for name in moved if not self.found else moved[1:]:
            self.found.setdefault(f"{name}, which the passes move")


def switch_off_recurrent_dropout(model: nn.Module) -> list[str]:
    """Sets the dropout of recurrent layers to 0, in place: they don't call a dropout function.

    Returns:
        The names of the layers that had some.
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.RNNBase) and module.dropout
    }
    for layer in layers.values():
        layer.dropout = 0.0
    return [*layers]


def _is_on(args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    p = args[1] if len(args) > 1 else options.get("p", 0.5)
    training = args[2] if len(args) > 2 else options.get("training", options.get("train", True))
    return bool(p and training)


def _generators() -> list[Any]:
    """Returns the state of each global generator."""
    states = [torch.get_rng_state().tolist(), random.getstate()]
    if "numpy" in sys.modules:
        kind, keys, *other_entries = sys.modules["numpy"].random.get_state()
        states.append((kind, keys.tolist(), *other_entries))
    return states


def _is_library(frame: FrameType) -> bool:
    """Whether a frame is in torch, eventloop, or the simulated device, which replaces torch's methods."""
    module = str(frame.f_globals.get("__name__", ""))
    is_pretend = module.startswith("eventloop_testing.pretend.")
    return is_pretend or frame.f_code.co_filename.startswith(_LIBRARIES)


def _place() -> str:
    """Returns the innermost line of the user's code, for a message."""
    frame = inspect.currentframe()
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    if frame is None:
        return "an unknown line"
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
