"""`state.update`: its passes and its errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor
from torch.optim import Optimizer

from eventloop.errors import PluginError, closest
from eventloop.fixes import switch_off
from eventloop.training.optimizers import params_of

if TYPE_CHECKING:
    from eventloop.plugin.plans import ActivePlugins, Plans
    from eventloop.state import State

# Leaves the loss of the microbatch under way in the State.
Passes = Callable[["State", "Plans"], None]
# Adds a batch's gradients to `.grad`; returns its mean loss, shape (), detached.
Accumulate = Callable[["State", "Plans", Mapping[str, Optimizer], Passes], Tensor]


def passes_of(loss_fn: Callable[[State], Tensor]) -> Passes:
    """Returns passes that leave everything to one function of a plugin's, with the same events."""

    def passes(state: State, hooks: Plans) -> None:
        hooks.before_forward(state)
        if (loss := loss_fn(state)) is None:
            raise PluginError(
                "update: the loss function returned None",
                fix="return the loss, a tensor of shape ()",
            )
        hooks.after_forward(state)
        hooks.before_loss(state)
        state.loss = loss
        hooks.after_loss(state)

    return passes


def named(
    optimizers: Mapping[str, Optimizer], names: Iterable[str], active: ActivePlugins
) -> dict[str, Optimizer]:
    """Returns the optimizers of some names, one or more; raises PluginError if one is unknown."""
    if isinstance(names, str):
        raise PluginError(
            f"update: optimizers={names!r} is not a list of names",
            fix=f"write optimizers=[{names!r}]",
        )
    names = tuple(names)
    for name in names:
        if name not in optimizers:
            fix = f"name some of {', '.join(map(repr, optimizers))}"
            asked = active.assembly.asked("build_optimizers")
            if by := [one.plugin.name for one in asked if one.plugin.role == "algorithm"]:
                fix += f", which {by[0]} built instead of the task's, or none for all; or switch "
                fix += f"{by[0]} off with " + switch_off(by[0])
            raise PluginError(
                f"update: no optimizer is named {name!r}{closest(name, optimizers)}", fix=fix
            )
    if not names:
        raise PluginError("update: no optimizer is named", fix="leave `optimizers` out for all")
    return {name: optimizers[name] for name in names}


def require_gradients(optimizers: Mapping[str, Optimizer]) -> None:
    """Checks that an update would change something.

    Raises:
        PluginError: no parameter of these optimizers has a gradient.
    """
    if any(param.grad is not None for param in params_of(optimizers.values())):
        return
    raise PluginError(
        f"update: the loss depends on no parameter of {', '.join(map(repr, optimizers))}",
        fix="name the optimizers whose parameters it is for, or leave out what cuts them off: "
        ".detach(), .item(), torch.no_grad()",
    )


def misplaced_update() -> PluginError:
    """Returns the error of an update that no batch has a place for."""
    return PluginError(
        "state.update was called outside of train_batch, or inside of another update",
        fix="call it in train_batch: `@hookimpl`, `def train_batch(self, state):`, "
        "`return state.update(loss_fn)`; a wrapper of train_batch may call it, too",
    )


def no_microbatch(state: State) -> PluginError:
    """Returns the error of a `split_batch` that left nothing to train on."""
    return PluginError(
        "split_batch returned no microbatch", by=state.owner("split_batch"), fix="give at least one"
    )
