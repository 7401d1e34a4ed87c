"""What can be known of an optimizer by looking at it, and what is done alike to all of them."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

if TYPE_CHECKING:
    from eventloop.state import State

# They have a fused implementation on CUDA (torch 2.13; Adagrad's is for the CPU alone).
_FUSED = (SGD, Adam, AdamW)


@runtime_checkable
class FollowsMetric(Protocol):
    """A scheduler that is told of evaluations."""

    def begin(self, state: State) -> None:
        """Called when all is built and loaded."""

    def observe(self, state: State) -> None:
        """Called when all data sets have been evaluated, on every rank."""


def wants_closure(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer's step can't do without its closure, as that of LBFGS can't."""
    # Of the class, since schedulers put another function in the instance's place (torch 2.13).
    _, *parameters = inspect.signature(type(optimizer).step).parameters.values()
    return any(
        one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters
    )


def could_be_fused(optimizer: Optimizer, device: torch.device) -> bool:
    """Returns whether `fused=True` would be faster, and the task hasn't chosen.

    Only on CUDA, where a step is then one kernel or a few, and fp16 waits less: on the CPU small
    models gain nothing. `fused=False` and `foreach=True` are decisions.
    """
    return (
        device.type == "cuda"
        and type(optimizer) in _FUSED
        and not any(
            group["fused"] is not None or group["foreach"] or group["differentiable"]
            for group in optimizer.param_groups
        )
    )


def drop_gradients(optimizer: Optimizer) -> None:
    """Does what `optimizer.zero_grad()` does.

    Where that is torch's own, without what torch does around it for profilers and compilers: 10 µs
    of a small step's 200.
    """
    if getattr(optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = None
