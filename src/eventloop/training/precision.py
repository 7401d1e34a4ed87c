"""Precision: in what the passes over a batch compute, one object a mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from eventloop.devices import kind_of
from eventloop.errors import SettingError
from eventloop.training.grad_scaling import Scaled, Unscaled

Function = TypeVar("Function", bound=Callable[..., Any])


class Precision:
    """How the passes over a batch compute, and how their gradients are used.

    Args:
        name: of the mode: fp32, tf32, bf16 or fp16.
        device: where it computes.
        autocast_to: the type under autocast; None for no autocast.
        tf32: whether products of float32 may be computed in TF32 on a GPU.
        scaling: whether the loss is scaled.

    Attributes:
        backward: adds the gradients of a loss, shape (), to `.grad`; scaled under fp16. An owner of
            the action `backward` calls it.
        once_stepped: calls a function as soon as it is known that a step was made: at once, or under
            fp16 before the next step.
        step: calls an optimizer's step; returns True, or under fp16 a `StepOutcome`. An owner of the
            action `optimizer_step` calls it and returns its result.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        *,
        autocast_to: torch.dtype | None = None,
        tf32: bool = True,
        scaling: Unscaled | Scaled | None = None,
    ) -> None:
        self.name: Final = name
        self._device = device
        self._autocast_to = autocast_to
        self._tf32 = tf32
        self._scaling = Unscaled() if scaling is None else scaling
        self.backward: Final = self._scaling.backward
        self.once_stepped: Final = self._scaling.once_stepped
        self.step: Final = self._scaling.step

    def under_autocast(self, function: Function) -> Function:
        """Returns `function` as it runs in this precision; itself where nothing is cast."""
        if self._autocast_to is None:
            return function
        cast = torch.autocast(self._device.type, dtype=self._autocast_to)
        return cast(function)  # type: ignore[no-any-return]

    def enclose(self, hook: str, plan: Function) -> Function:
        """Returns the plan of a hook as it runs in this precision, wrappers included."""
        if hook in _UNDER_AUTOCAST:
            return self.under_autocast(plan)
        return self._scaling.enclose(hook, plan)  # type: ignore[return-value]  # the same arguments

    def check(self, model: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
        """Raises SettingError if this model can't be trained in this precision by these optimizers."""
        self._scaling.check(model, optimizers)

    def found_inf(self) -> Sequence[Tensor]:
        """Returns the flag for overflowed gradients, see `Scaled.found_inf`; only fp16 has one."""
        return self._scaling.found_inf()

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs, as JSON values; waits for the device."""
        return self._scaling.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self._scaling.load_state_dict(state)

    def in_force(self) -> AbstractContextManager[None]:
        """Returns a context in which the process uses TF32 on a GPU, or doesn't."""
        return kind_of(self._device).float32_products(tf32=self._tf32)


def choose_precision(name: str, device: torch.device) -> Precision:
    """Returns the precision of this name.

    Args:
        name: fp32, tf32, bf16, fp16, or auto: on a GPU bf16 if it has that in hardware, else fp16;
            fp32 elsewhere.

    Raises:
        SettingError: there is none of this name, or the device can't do it.
    """
    if name == "auto":
        name = kind_of(device).best_precision()
    if name not in _MODES:
        raise SettingError(
            f"no precision is named {name!r}", fix=f"one of auto, {', '.join(_MODES)}"
        )
    if reason := kind_of(device).why_not(name):
        raise SettingError(f"precision={name!r}, but {reason}", fix="set precision to auto or fp32")
    return _MODES[name](device)


# Autocast encloses the plans of these actions.
_UNDER_AUTOCAST = ("forward", "loss", "eval_forward", "predict_forward")

_MODES: Mapping[str, Callable[[torch.device], Precision]] = {
    "fp32": lambda device: Precision("fp32", device, tf32=False),
    "tf32": lambda device: Precision("tf32", device),
    "bf16": lambda device: Precision("bf16", device, autocast_to=torch.bfloat16),
    "fp16": lambda device: Precision(
        "fp16", device, autocast_to=torch.float16, scaling=Scaled(device)
    ),
}
