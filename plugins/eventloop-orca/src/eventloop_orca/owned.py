"""The actions that a main callback owns: the actions that it has a method for.

Each class here is a part of a main callback; the plugin adopts the hooks of its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from eventloop import PluginError, State, hookimpl
from eventloop_orca.points import Points
from eventloop_orca.runner import Runner


class Part:
    """A part of a main callback.

    Args:
        points: calls the callback's methods.
        runner: returns the runner, which exists once the trainer is complete.

    Attributes:
        actions: names of the hooks that it owns.
        conflicts: names of plugins that can't work with it.
    """

    actions: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()

    def __init__(self, points: Points, runner: Callable[[], Runner]) -> None:
        self._points = points
        self._runner = runner

    def _tell(self, point: str) -> None:
        self._points.call(point, self._runner())

    def _left(self, name: str, point: str) -> Any:
        """Returns the value that the callback assigned to an attribute of the runner."""
        value = getattr(self._runner(), name, None)
        if value is None:
            raise PluginError(
                f"{type(self._points.main).__name__}.{point} left no {name}",
                fix=f"let it assign runner.{name}",
            )
        return value


class Passes(Part):
    """Forward pass and loss: of every main callback."""

    actions = ("forward", "loss", "eval_forward", "predict_forward")
    # These plugins change the task's loss, or need it for other targets or per sample.
    conflicts = ("cutmix", "label-smoothing", "mixup", "selective-backprop")

    @hookimpl
    def forward(self, state: State) -> Any:
        """The point `on_train_forward`, which sets output and loss."""
        self._tell("on_train_forward")
        return self._left("output", "on_train_forward")

    @hookimpl
    def loss(self, state: State) -> Tensor:
        """Returns the loss that the forward pass has set."""
        loss: Tensor = self._left("loss", "on_train_forward")
        return loss

    @hookimpl
    def eval_forward(self, state: State) -> Any:
        """The point `on_val_forward`."""
        self._tell("on_val_forward")
        return self._left("output", "on_val_forward")

    @hookimpl
    def predict_forward(self, state: State) -> Any:
        """The point `on_pred_forward`."""
        self._tell("on_pred_forward")
        return self._left("output", "on_pred_forward")


class Step(Part):
    """Gradients and step: of a main callback that overrides `on_iter_backward`."""

    actions = ("backward", "clip_gradients", "optimizer_step", "zero_grad")
    # These plugins act after the backward pass, when the callback has already made the step.
    conflicts = ("agc", "sam")

    @hookimpl
    def backward(self, state: State, loss: Tensor) -> bool:
        """The point `on_iter_backward`."""
        self._runner().loss = loss
        self._tell("on_iter_backward")
        return True

    @hookimpl
    def clip_gradients(
        self, state: State, optimizers: Mapping[str, Optimizer]
    ) -> dict[str, Tensor]:
        """Does nothing: the callback has already made the step."""
        return {}

    @hookimpl
    def optimizer_step(
        self, state: State, optimizers: Mapping[str, Optimizer], closure: Callable[[], Tensor]
    ) -> bool:
        """Returns True: the callback has made the step."""
        return True

    @hookimpl
    def zero_grad(self, state: State, optimizers: Mapping[str, Optimizer]) -> bool:
        """Skips zeroing: the callback may accumulate gradients over several batches."""
        return True


class Rates(Part):
    """The learning rates: of a main callback that overrides `on_lr_adjust`."""

    actions = ("scheduler_step",)

    @hookimpl
    def scheduler_step(self, state: State, interval: str) -> bool:
        """The point `on_lr_adjust`, once an epoch."""
        if interval == "ep":
            self._tell("on_lr_adjust")
        return True


def parts_of_main(points: Points, runner: Callable[[], Runner]) -> list[Part]:
    """Returns the parts that a main callback has; empty without a main callback."""
    if points.main is None:
        return []
    components: list[Part] = [Passes(points, runner)]
    if points.overrides("on_iter_backward"):
        components.append(Step(points, runner))
    if points.overrides("on_lr_adjust"):
        components.append(Rates(points, runner))
    return components
