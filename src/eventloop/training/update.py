"""Accumulation: the gradients of a batch, a microbatch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from torch import Tensor
from torch.optim import Optimizer

from eventloop.errors import PluginError, closest

if TYPE_CHECKING:
    from eventloop.distributed.processes import Processes
    from eventloop.plugin.plans import Plans
    from eventloop.state import State

# Leaves the loss of the microbatch at hand in the State.
Passes = Callable[["State", "Plans"], None]


def passes_of(loss_fn: Callable[[State], Tensor]) -> Passes:
    """Gives passes that leave everything to one function of a plugin's, with the same events."""

    def passes(state: State, hooks: Plans) -> None:
        hooks.before_forward(state)
        loss = loss_fn(state)
        if loss is None:
            raise PluginError(
                "update: the loss function gave None", fix="return the loss, a tensor of shape ()"
            )
        hooks.after_forward(state)
        hooks.before_loss(state)
        state.loss = loss
        hooks.after_loss(state)

    return passes


def named(optimizers: Mapping[str, Optimizer], names: Iterable[str]) -> dict[str, Optimizer]:
    """Gives the optimizers of these names.

    Raises:
        PluginError: there is none of a name, or none is named.
    """
    if isinstance(names, str):
        raise PluginError(
            f"update: optimizers={names!r} is no list of names", fix=f"write optimizers=[{names!r}]"
        )
    names = tuple(names)
    for name in names:
        if name not in optimizers:
            raise PluginError(
                f"update: no optimizer is named {name!r}{closest(name, optimizers)}",
                fix=f"name some of {', '.join(map(repr, optimizers))}",
            )
    if not names:
        raise PluginError("update: no optimizer is named", fix="leave `optimizers` out for all")
    return {name: optimizers[name] for name in names}


def require_gradients(optimizers: Mapping[str, Optimizer]) -> None:
    """Checks that an update would change something.

    Raises:
        PluginError: no parameter of these optimizers has a gradient.
    """
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            if any(param.grad is not None for param in group["params"]):
                return
    raise PluginError(
        f"update: the loss depends on no parameter of {', '.join(map(repr, optimizers))}",
        fix="name the optimizers whose parameters it is for, or leave out what cuts them off: "
        ".detach(), .item(), torch.no_grad()",
    )


def misplaced_update() -> PluginError:
    """Gives the error of an update that no batch has a place for."""
    return PluginError(
        "state.update was called outside of train_batch, or inside of another update",
        fix="call it in train_batch: `@hookimpl`, `def train_batch(self, state):`, "
        "`return state.update(loss_fn)`; a wrapper of train_batch may call it, too",
    )


class Accumulation(Protocol):
    """Fills `.grad` for a batch."""

    splitter: str

    def __call__(
        self, state: State, hooks: Plans, optimizers: Mapping[str, Optimizer], passes: Passes
    ) -> Tensor:
        """Runs all microbatches; gives the batch's mean loss, detached.

        Args:
            hooks: with or without the events of a microbatch.
            optimizers: whose parameters the gradients are for.
            passes: runs a microbatch from its forward pass to its loss.
        """


class Microbatches:
    """Runs the microbatches that `split_batch` gives.

    Args:
        processes: those that train together.

    Attributes:
        splitter: who owns `split_batch`, for messages.
    """

    def __init__(self, processes: Processes) -> None:
        self.splitter = ""
        self._processes = processes

    def __call__(
        self, state: State, hooks: Plans, optimizers: Mapping[str, Optimizer], passes: Passes
    ) -> Tensor:
        """Runs all microbatches; gives the batch's mean loss, detached."""
        microbatches = hooks.split_batch(state)
        if not microbatches:
            raise PluginError(
                "split_batch gave no microbatch", by=self.splitter, fix="give at least one"
            )
        state.num_microbatches = len(microbatches)
        shares = self._processes.shares(state, microbatches, hooks.count_batch)
        mean_loss: Tensor | None = None
        for idx, microbatch in enumerate(microbatches):
            state.microbatch, state.microbatch_idx = microbatch, idx
            passes(state, hooks)
            hooks.before_backward(state)
            assert state.loss is not None
            loss = shares.scaled(state.loss, idx)
            hooks.backward(state, loss)
            hooks.after_backward(state)
            loss = loss.detach()
            mean_loss = loss if mean_loss is None else mean_loss + loss
            state.microbatch = state.outputs = state.loss = None
        assert mean_loss is not None
        return mean_loss
