"""Precision: one object a mode, all with the same methods, so that the loop has no `if` on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from eventloop.errors import SettingError

Function = TypeVar("Function", bound=Callable[..., Any])


class Precision(Protocol):
    """How the passes over a batch compute."""

    name: str

    def under_autocast(self, function: Function) -> Function:
        """Gives `function` as it runs in this precision; itself where nothing is cast."""

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of `loss`, shape (), to `.grad`."""


class FullPrecision:
    """float32 throughout."""

    name = "fp32"

    def under_autocast(self, function: Function) -> Function:
        """Gives `function` itself."""
        return function

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of `loss` to `.grad`."""
        loss.backward()  # type: ignore[no-untyped-call]


class Bfloat16:
    """bfloat16 under autocast, float32 weights; needs no scaling of the loss."""

    name = "bf16"

    def __init__(self, device: torch.device) -> None:
        self._device_type = device.type

    def under_autocast(self, function: Function) -> Function:
        """Gives `function` inside `torch.autocast` with bfloat16."""
        cast = torch.autocast(self._device_type, dtype=torch.bfloat16)
        return cast(function)  # type: ignore[no-any-return]

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of `loss` to `.grad`."""
        loss.backward()  # type: ignore[no-untyped-call]


def choose_precision(name: str, device: torch.device) -> Precision:
    """Gives the precision of this name.

    Args:
        name: fp32, bf16, or auto: bf16 on a GPU that has it in hardware, else fp32.

    Raises:
        SettingError: there is none of this name, or the device can't do it.
    """
    bf16_on_gpu = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if name == "auto":
        name = "bf16" if bf16_on_gpu else "fp32"
    if name == "fp32":
        return FullPrecision()
    if name == "bf16":
        if device.type == "cuda" and not bf16_on_gpu:
            raise SettingError(
                f"precision='bf16', but {torch.cuda.get_device_name(device)} doesn't have it",
                fix="set precision to auto or fp32",
            )
        return Bfloat16(device)
    raise SettingError(f"no precision is named {name!r}", fix="one of auto, fp32, bf16")
