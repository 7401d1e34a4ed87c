"""Switches the pretend device on and off."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from eventloop_testing.pretend import (
    autocast,
    copies,
    device_module,
    fused,
    generators,
    lines,
    memory,
    private,
    transfers,
)
from eventloop_testing.pretend.errors import PretendError
from eventloop_testing.pretend.patches import patched


@contextmanager
def pretend_device(
    limit_bytes: int = memory.TOTAL_BYTES, *, draws_from_host: bool = False
) -> Iterator[torch.device]:
    """Switches the pretend device on inside its context; may be nested.

    Args:
        limit_bytes: size of its memory, beyond which an allocation raises `torch.OutOfMemoryError`.
        draws_from_host: whether to draw random numbers from the host's generator, so that a run with
            dropout has the same bits as on the CPU.

    Yields:
        The device, pretend:0.

    Raises:
        RaceError: at its end, if a pinned buffer was written too early.
        PretendError: the process has a real accelerator, which it would replace for good.
    """
    _register()
    limit = memory.COUNTS.limit
    memory.COUNTS.limit = limit_bytes
    was_on = device_module.is_switched_on
    with (
        nullcontext() if was_on else patched(),
        private.backward_on_this_thread(),
        generators.drawing_from_host(draws_from_host),
    ):
        device_module.is_switched_on = True
        try:
            yield private.selected()
            lines.host_waits()
        finally:
            device_module.is_switched_on = was_on
            memory.COUNTS.limit = limit
            copies.forget()
            memory.forget_freed()


@functools.cache
def _register() -> None:
    """Registers the device with torch, for the rest of the process."""
    if torch.accelerator.is_available():
        raise PretendError(
            "a process with an accelerator can't have the pretend one, too, which torch would take "
            "for the only one from then on: hide it, by CUDA_VISIBLE_DEVICES= for a GPU of NVIDIA"
        )
    private.register(device_module, device_module.is_available)
    transfers.implement()
    fused.implement()
    autocast.implement()
