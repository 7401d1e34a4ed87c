"""Steps of optimizers with which an algorithm of Composer, such as SAM, wraps the run's own."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from eventloop import PluginError, State, hookimpl
from eventloop_composer.session import Session

_HOOKS = (
    "optimizer_step",
    "capture_optimizers",
    "restore_optimizers",
    "around_forward",
    "around_loss",
    "around_backward",
    "backward",
)


class Steps:
    """Lets wrapping optimizers step with Composer's closure, and saves the wrapped optimizers.

    If such an optimizer computes the gradients again, the events of the passes fire again, as
    they do under Composer's trainer.

    Args:
        session: fires the events.

    Attributes:
        hooks: names of the hooks for the plugin.
    """

    def __init__(self, session: Session) -> None:
        self.hooks = _HOOKS if session.algorithms else ()
        self._session = session
        self._inner: dict[str, Optimizer] = {}
        self._states: Mapping[str, dict[str, Any]] | None = None
        self._repeats = False
        self._creates_graph = any(
            algorithm.backwards_create_graph for algorithm in session.algorithms
        )

    def check(self, state: State) -> None:
        """Refuses algorithms whose requirements this run doesn't meet.

        Raises:
            PluginError: there is such an algorithm.
        """
        names = [
            type(algorithm).__name__
            for algorithm in self._session.algorithms
            if algorithm.find_unused_parameters
        ]
        if names and state.world_size > 1 and not state.settings.find_unused_parameters:
            raise PluginError(
                f"{', '.join(names)} leaves parameters without a gradient, which several ranks have "
                "to look for",
                fix="set find_unused_parameters=True",
            )

    def take_optimizers(self, state: State, previous_optimizers: Sequence[Optimizer]) -> None:
        """Takes over optimizers with which an algorithm replaced the run's own."""
        optimizers = self._session.mirror.theirs.optimizers
        pairs = zip(optimizers, previous_optimizers, strict=True)
        if all(optimizer is previous for optimizer, previous in pairs):
            return
        if state.precision.name == "fp16":
            raise PluginError(
                "an algorithm of Composer's wraps the optimizer, whose steps fp16 would have to scale",
                fix="set precision to bf16 or fp32",
            )
        self._inner = dict(zip(state.optimizers, previous_optimizers, strict=True))
        state.optimizers = dict(zip(state.optimizers, optimizers, strict=True))

    @hookimpl(conditional=True)
    def optimizer_step(
        self, state: State, optimizers: Mapping[str, Optimizer], closure: Callable[[], Tensor]
    ) -> bool | None:
        """Steps the wrapping optimizers; the first call of their closure reuses the existing gradients."""
        if not self._inner:
            return None
        for name, optimizer in optimizers.items():
            if optimizer is self._inner[name]:
                state.precision.step(optimizer)
            else:
                optimizer.step(_Closure(self, state, closure))
        return True

    def repeat(self, closure: Callable[[], Tensor]) -> float:
        """Computes the gradients again, with Composer's events; returns the batch's loss."""
        self._session.fire("before_train_batch")
        self._repeats = True
        try:
            loss = closure()
        finally:
            self._repeats = False
        self._session.fire("after_train_batch")
        return loss.item()

    @hookimpl(wrapper=True, specname="forward")
    def around_forward(self, state: State) -> Generator[None, Any, Any]:
        """Fires the events around a forward pass that is computed again."""
        if not self._repeats:
            return (yield)
        self._session.fire("before_forward")
        state.outputs = yield
        self._session.fire("after_forward")
        return state.outputs

    @hookimpl(wrapper=True, specname="loss")
    def around_loss(self, state: State) -> Generator[None, Tensor, Tensor | None]:
        """Fires the events around a loss that is computed again, and before its backward pass."""
        if not self._repeats:
            return (yield)
        self._session.fire("before_loss")
        state.loss = yield
        self._session.fire("after_loss")
        self._session.fire("before_backward")
        return state.loss

    @hookimpl(wrapper=True, specname="backward")
    def around_backward(self, state: State, loss: Tensor) -> Generator[None, bool, bool]:
        """Fires the event after a backward pass that is computed again."""
        is_done = yield
        if self._repeats:
            self._session.fire("after_backward")
        return is_done

    @hookimpl(conditional=True)
    def backward(self, state: State, loss: Tensor) -> bool | None:
        """Keeps the graph of the gradients, if an algorithm needs it."""
        if not self._creates_graph:
            return None
        loss.backward(create_graph=True)  # type: ignore[no-untyped-call]
        return True

    @hookimpl(conditional=True)
    def capture_optimizers(self, state: State) -> Mapping[str, dict[str, Any]] | None:
        """Returns the states of the optimizers, of the wrapped optimizers if they are wrapped.

        The states of frozen parameters that were removed from their group are dropped: torch can't name them.
        """
        optimizers = self._inner or state.optimizers
        for optimizer in optimizers.values():
            param_ids = {id(param) for group in optimizer.param_groups for param in group["params"]}
            for param in [param for param in optimizer.state if id(param) not in param_ids]:
                del optimizer.state[param]
        if not self._inner:
            return None
        return {name: optimizer.state_dict() for name, optimizer in optimizers.items()}

    @hookimpl(conditional=True)
    def restore_optimizers(self, state: State, states: Mapping[str, dict[str, Any]]) -> bool | None:
        """Defers loading until `restore` knows which parameters were trained, if the groups have shrunk."""
        for name, optimizer in state.optimizers.items():
            saved_sizes = [len(group["params"]) for group in states[name]["param_groups"]]
            if saved_sizes != [len(group["params"]) for group in optimizer.param_groups]:
                self._states = states
                return True
        return None

    def restore(self, state: State, trained: Mapping[str, Any]) -> None:
        """Freezes the parameters that were frozen in the checkpoint, then loads the optimizers.

        Args:
            trained: the result of `trained_names` in the checkpoint.
        """
        states = self._states
        self._states = None
        if states is None:
            return
        params = dict(state.model.named_parameters())
        for name in trained["frozen"]:
            params[name].requires_grad = False
        names = {id(param): name for name, param in params.items()}
        for key, optimizer in state.optimizers.items():
            for group, saved in zip(optimizer.param_groups, trained["groups"][key], strict=True):
                group["params"] = [
                    param for param in group["params"] if names.get(id(param)) in saved
                ]
            optimizer.load_state_dict(states[key])

    def wrappers(self) -> dict[str, Any]:
        """Returns the plain attributes and the state of optimizers that wrap others."""
        saved = {}
        for name, outer in zip(self._inner, self._session.mirror.theirs.optimizers, strict=False):
            plain = (bool, int, float, str)
            attributes = {
                key: value for key, value in vars(outer).items() if isinstance(value, plain)
            }
            saved[name] = {"attributes": attributes, "state": outer.state_dict()["state"]}
        return saved

    def put_wrappers(self, saved: Mapping[str, Any]) -> None:
        """Restores the result of `wrappers`; parameter groups belong to the wrapped optimizers."""
        for name, outer in zip(self._inner, self._session.mirror.theirs.optimizers, strict=False):
            if name not in saved:
                continue
            vars(outer).update(saved[name]["attributes"])
            params = [param for group in outer.param_groups for param in group["params"]]
            for idx, values in saved[name]["state"].items():
                device = params[idx].device
                outer.state[params[idx]] = {
                    key: value.to(device) if isinstance(value, Tensor) else value
                    for key, value in values.items()
                }


class _Closure:
    """The closure that Composer's trainer passes to an optimizer."""

    def __init__(self, steps: Steps, state: State, closure: Callable[[], Tensor]) -> None:
        self._steps = steps
        self._closure = closure
        assert state.loss is not None
        self._first: Tensor | None = state.loss

    def __call__(self, *, loss_dict: Any = None, ddp_sync: bool = True) -> float:
        """Returns the loss with its gradients computed; the first call reuses the existing gradients.

        Args:
            loss_dict: dict in which Composer adds up losses; only the losses of the first pass are logged.
            ddp_sync: whether ranks exchange gradients; here they always do.
        """
        first_loss = self._first
        self._first = None
        if first_loss is not None:
            return first_loss.item()
        with torch.enable_grad():
            return self._steps.repeat(self._closure)
