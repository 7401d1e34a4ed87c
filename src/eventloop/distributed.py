"""The processes that train together, and the device of each.

One object stands for one process; more processes are another object with the same methods.
"""

from __future__ import annotations

import os

import torch
from torch import nn

from eventloop.errors import EventloopError, SettingError


class SingleProcess:
    """Training in one process."""

    rank = 0
    local_rank = 0
    world_size = 1

    def wrap(self, model: nn.Module) -> nn.Module:
        """Gives what the forward pass calls: the model itself."""
        return model


def join_processes() -> SingleProcess:
    """Gives the processes that this one trains with.

    Raises:
        EventloopError: torchrun started several, which this version can't train in.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != 1:
        raise EventloopError(
            f"WORLD_SIZE is {world_size}, but this version trains in one process",
            fix="start it without torchrun, or unset WORLD_SIZE",
        )
    return SingleProcess()


def choose_device(name: str, local_rank: int) -> torch.device:
    """Gives the device of this process.

    Args:
        name: cpu, cuda, cuda:1, or auto: this process's GPU where there is one.
        local_rank: this process's number on its machine.

    Raises:
        SettingError: there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", local_rank)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SettingError(
            f"device={name!r} can't be used: {reason}",
            fix="set device to auto or cpu",
        ) from error
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
