"""Precision: the dtypes in which the passes over a batch compute."""

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
    """Autocast, TF32 and loss scaling of a run.

    Args:
        name: the name of the mode: fp32, tf32, bf16 or fp16.
        device: the device of the run.
        autocast_to: the dtype for autocast; None for no autocast.
        tf32: whether float32 matrix products may be computed in TF32 on a GPU.
        scaling: scales the loss; None for no scaling.

    Attributes:
        backward: adds the gradients of a loss, shape (), to `.grad`; with fp16, gradients of the scaled
            loss. A plugin that implements the action `backward` calls it.
        once_stepped: calls a function once it is known that a step was made: immediately, or with fp16
            before the next step.
        step: calls `step` of an optimizer; returns True, or with fp16 a `StepOutcome`. A plugin that
            implements the action `optimizer_step` calls it and returns its result.
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
        """Returns `function` wrapped in autocast, or unchanged if this precision has no autocast."""
        if self._autocast_to is None:
            return function
        cast = torch.autocast(self._device.type, dtype=self._autocast_to)
        return cast(function)  # type: ignore[no-any-return]

    def enclose(self, hook: str, plan: Function) -> Function:
        """Returns the plan of a hook, including its wrappers, for this precision."""
        if hook in _UNDER_AUTOCAST:
            return self.under_autocast(plan)
        return self._scaling.enclose(hook, plan)  # type: ignore[return-value]  # the same arguments

    def check(self, model: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
        """Raises SettingError if the model or the optimizers don't support this precision."""
        self._scaling.check(model, optimizers)

    def found_inf(self) -> Sequence[Tensor]:
        """Returns the flags for overflowed gradients, see `Scaled.found_inf`; () except with fp16."""
        return self._scaling.found_inf()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the loss scaling, as JSON values; waits for the device."""
        return self._scaling.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state_dict`."""
        self._scaling.load_state_dict(state)

    def in_force(self) -> AbstractContextManager[None]:
        """Returns a context manager that sets whether the process uses TF32 on a GPU."""
        return kind_of(self._device).float32_products(tf32=self._tf32)


def choose_precision(name: str, device: torch.device) -> Precision:
    """Returns the precision with this name.

    Args:
        name: fp32, tf32, bf16, fp16, or auto: on a GPU bf16 if the hardware supports it, else fp16;
            on other devices fp32.

    Raises:
        SettingError: no precision has this name, or the device doesn't support it.
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


# The actions that run under autocast. `backward` doesn't: autograd uses the dtypes of the forward pass.
_UNDER_AUTOCAST = ("forward", "loss", "eval_forward", "predict_forward")

_MODES: Mapping[str, Callable[[torch.device], Precision]] = {
    "fp32": lambda device: Precision("fp32", device, tf32=False),
    "tf32": lambda device: Precision("tf32", device),
    "bf16": lambda device: Precision("bf16", device, autocast_to=torch.bfloat16),
    "fp16": lambda device: Precision(
        "fp16", device, autocast_to=torch.float16, scaling=Scaled(device)
    ),
}
