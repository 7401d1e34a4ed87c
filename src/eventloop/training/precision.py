"""Precision: in what the passes over a batch compute, one object a mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

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
        """Checks that this model can be trained in this precision by these optimizers.

        Raises:
            SettingError: it can't.
        """
        self._scaling.check(model, optimizers)

    def found_inf(self) -> Sequence[Tensor]:
        """Returns the flag for overflowed gradients, see `Scaled.found_inf`; only fp16 has one."""
        return self._scaling.found_inf()

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs, as JSON values; waits for the device."""
        return self._scaling.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave."""
        self._scaling.load_state_dict(state)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Sets what counts for the whole process, and puts it back: TF32 on a GPU, or none."""
        if self._device.type != "cuda":
            yield
            return
        saved = _Saved()
        try:
            # The older of torch's two interfaces: who reads by either then finds an answer, while
            # the older one raises where the newer one has set something else (torch 2.13).
            torch.set_float32_matmul_precision("high" if self._tf32 else "highest")
            torch.backends.cudnn.allow_tf32 = self._tf32
            yield
        finally:
            saved.put_back()


def choose_precision(name: str, device: torch.device) -> Precision:
    """Returns the precision of this name.

    Args:
        name: fp32, tf32, bf16, fp16, or auto: on a GPU bf16 if it has that in hardware, else fp16;
            fp32 elsewhere.

    Raises:
        SettingError: there is none of this name, or the device can't do it.
    """
    if name == "auto":
        name = _best(device)
    if name not in _MODES:
        raise SettingError(
            f"no precision is named {name!r}", fix=f"one of auto, {', '.join(_MODES)}"
        )
    if reason := _why_not(name, device):
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


class _Saved:
    """What the process computes products of float32 in, to be put back as it was."""

    def __init__(self) -> None:
        backends = torch.backends
        holders: tuple[Any, ...] = (
            backends.cuda.matmul,
            backends.cudnn.conv,  # type: ignore[attr-defined]
            backends.cudnn.rnn,
            backends.mkldnn.matmul,  # type: ignore[attr-defined]
        )
        self._exact = [(one, one.fp32_precision) for one in holders]
        try:
            self._older = (torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32)
        except RuntimeError:  # it was set through the newer interface alone
            self._older = ("highest", True)

    def put_back(self) -> None:
        torch.set_float32_matmul_precision(self._older[0])
        torch.backends.cudnn.allow_tf32 = self._older[1]
        for holder, precision in self._exact:
            holder.fp32_precision = precision


def _best(device: torch.device) -> str:
    if device.type != "cuda":
        return "fp32"  # bf16 is emulated on most hosts: slower, and no less memory
    return "bf16" if _has_bf16() else "fp16"


def _has_bf16() -> bool:
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def _why_not(name: str, device: torch.device) -> str:
    """Returns why a device can't compute in a precision, or "" where it can."""
    on_gpu = device.type == "cuda"
    if name == "tf32" and not on_gpu:
        return f"TF32 is a unit of NVIDIA GPUs, and the device is {device}"
    if name == "tf32" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} doesn't have it"
    if name == "bf16" and on_gpu and not _has_bf16():
        return f"{torch.cuda.get_device_name(device)} doesn't have it"
    if name in ("bf16", "fp16") and not torch.amp.is_autocast_available(device.type):
        return f"torch has no autocast for {device.type}"
    return ""
