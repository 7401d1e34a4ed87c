"""Clipping of gradients, by norm and by value."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from eventloop.training.sharded_tensors import local, total_norm


def clip_(
    params: Sequence[Tensor], norm: float | None, value: float | None, *, has_shards: bool
) -> dict[str, Tensor]:
    """Clips the gradients of parameters, in place; returns what is logged: the norm before.

    Args:
        norm: the largest norm of all of them together.
        value: the largest absolute value of an entry.
        has_shards: whether some are shards, whose norm is a sum over ranks: collective then.
    """
    held: Any = params
    logged = {}
    if has_shards:
        grads = [param.grad for param in params if param.grad is not None]
        held = [SimpleNamespace(grad=local(grad)) for grad in grads]  # in the place of parameters
        if norm is not None:
            logged["grad_norm"] = total_norm(grads)
            nn.utils.clip_grads_with_norm_(held, norm, logged["grad_norm"])
    elif norm is not None:
        logged["grad_norm"] = nn.utils.clip_grad_norm_(params, norm)
    if value is not None:
        nn.utils.clip_grad_value_(held, value)
    return logged
