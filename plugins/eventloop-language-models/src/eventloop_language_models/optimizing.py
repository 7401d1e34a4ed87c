"""The optimizer and its schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from eventloop import schedules

Schedule = Literal["linear", "cosine", "constant"]


def adamw(model: nn.Module, *, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Returns AdamW of what is trained."""
    params = [one for one in model.parameters() if one.requires_grad]
    return torch.optim.AdamW(params, lr, weight_decay=weight_decay)


def schedule_of(schedule: Schedule, warmup: str | None) -> Callable[..., Any]:
    """Returns a schedule of eventloop."""
    made: dict[str, Callable[..., Any]] = {
        "linear": schedules.linear,
        "cosine": schedules.cosine,
        "constant": schedules.constant,
    }
    found: Callable[..., Any] = made[schedule](warmup=warmup)
    return found
