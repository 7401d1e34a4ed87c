"""The passes and the errors of `state.update`."""

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

# Sets `state.loss` for the current microbatch.
Passes = Callable[["State", "Plans"], None]
# Adds a batch's gradients to `.grad`; returns its mean loss, shape (), detached.
Accumulate = Callable[["State", "Plans", Mapping[str, Optimizer], Passes], Tensor]


def passes_of(loss_fn: Callable[[State], Tensor]) -> Passes:
    """Returns passes that call a plugin's function instead of forward and loss, with the same events."""

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
    """Returns the optimizers with these names; raises PluginError if a name is unknown."""
    if isinstance(names, str):
        raise PluginError(
            f"update: optimizers={names!r} is not a list of names",
            fix=f"write optimizers=[{names!r}]",
        )
    names = tuple(names)
    for name in names:
        if name not in optimizers:
            fix = f"name some of {', '.join(map(repr, optimizers))}"
            for implementation in active.assembly.asked("build_optimizers"):
                if implementation.plugin.role == "algorithm":
                    builder = implementation.plugin.name
                    fix += f", which {builder} built instead of the task's, or none for all; or "
                    fix += f"switch {builder} off with " + switch_off(builder)
                    break
            raise PluginError(
                f"update: no optimizer is named {name!r}{closest(name, optimizers)}", fix=fix
            )
    if not names:
        raise PluginError(
            "update: no optimizer is named", fix="omit `optimizers` to step all of them"
        )
    return {name: optimizers[name] for name in names}


def require_gradients(optimizers: Mapping[str, Optimizer]) -> None:
    """Raises PluginError if no parameter of the optimizers has a gradient."""
    if any(param.grad is not None for param in params_of(optimizers.values())):
        return
    raise PluginError(
        f"update: the loss depends on no parameter of {', '.join(map(repr, optimizers))}",
        fix="name the optimizers of the parameters that the loss depends on, or remove what detaches "
        "them: .detach(), .item(), torch.no_grad()",
    )


def misplaced_update() -> PluginError:
    """Returns the error for an update outside of `train_batch`."""
    return PluginError(
        "state.update was called outside of train_batch, or within another update",
        fix="call it in train_batch: `@hookimpl`, `def train_batch(self, state):`, "
        "`return state.update(loss_fn)`, or in a wrapper of train_batch",
    )


def no_microbatch(state: State) -> PluginError:
    """Returns the error for a `split_batch` that returned no microbatch."""
    return PluginError(
        "split_batch returned no microbatch",
        by=state.owner("split_batch"),
        fix="return at least one",
    )
