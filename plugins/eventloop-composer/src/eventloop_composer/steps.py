"""Steps of optimizers that an algorithm of Composer's has put around the run's own, as SAM does."""

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
    """Lets replaced optimizers step with Composer's closure, and keeps what they are made of.

    Where such an optimizer computes the gradients again, the events of the passes fire again, as
    they do under Composer's trainer.

    Args:
        session: fires them.

    Attributes:
        hooks: what the plugin takes over.
    """

    def __init__(self, session: Session) -> None:
        self.hooks = _HOOKS if session.algorithms else ()
        self._session = session
        self._inner: dict[str, Optimizer] = {}
        self._states: Mapping[str, dict[str, Any]] | None = None
        self._repeats = False
        self._creates_graph = any(one.backwards_create_graph for one in session.algorithms)

    def check(self, state: State) -> None:
        """Refuses algorithms that need what this run doesn't have.

        Raises:
            PluginError: there is one.
        """
        names = [
            type(one).__name__ for one in self._session.algorithms if one.find_unused_parameters
        ]
        if names and state.world_size > 1 and not state.settings.find_unused_parameters:
            raise PluginError(
                f"{', '.join(names)} leaves parameters without a gradient, which several ranks have "
                "to look for",
                fix="set find_unused_parameters=True",
            )

    def take_optimizers(self, state: State, before: Sequence[Optimizer]) -> None:
        """Takes over optimizers that an algorithm has put in the place of the run's own."""
        now = self._session.mirror.theirs.optimizers
        if all(one is other for one, other in zip(now, before, strict=True)):
            return
        if state.precision.name == "fp16":
            raise PluginError(
                "an algorithm of Composer's wraps the optimizer, whose steps fp16 would have to scale",
                fix="set precision to bf16 or fp32",
            )
        self._inner = dict(zip(state.optimizers, before, strict=True))
        state.optimizers = dict(zip(state.optimizers, now, strict=True))

    @hookimpl(conditional=True)
    def optimizer_step(
        self, state: State, optimizers: Mapping[str, Optimizer], closure: Callable[[], Tensor]
    ) -> bool | None:
        """Has replaced optimizers step: the first call of their closure finds gradients in place."""
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
        done = yield
        if self._repeats:
            self._session.fire("after_backward")
        return done

    @hookimpl(conditional=True)
    def backward(self, state: State, loss: Tensor) -> bool | None:
        """Keeps the graph of the gradients, where an algorithm wants it."""
        if not self._creates_graph:
            return None
        loss.backward(create_graph=True)  # type: ignore[no-untyped-call]
        return True

    @hookimpl(conditional=True)
    def capture_optimizers(self, state: State) -> Mapping[str, dict[str, Any]] | None:
        """Returns the states of the optimizers, of those inside where others replaced them.

        Of what was frozen, and taken out of its group, nothing is kept: torch can't name it.
        """
        optimizers = self._inner or state.optimizers
        for one in optimizers.values():
            held = {id(param) for group in one.param_groups for param in group["params"]}
            for param in [param for param in one.state if id(param) not in held]:
                del one.state[param]
        if not self._inner:
            return None
        return {name: one.state_dict() for name, one in optimizers.items()}

    @hookimpl(conditional=True)
    def restore_optimizers(self, state: State, states: Mapping[str, dict[str, Any]]) -> bool | None:
        """Waits for the names of what was trained, where that was less than there is now."""
        for name, optimizer in state.optimizers.items():
            then = [len(one["params"]) for one in states[name]["param_groups"]]
            if then != [len(one["params"]) for one in optimizer.param_groups]:
                self._states = states
                return True
        return None

    def restore(self, state: State, trained: Mapping[str, Any]) -> None:
        """Leaves out what was frozen when the checkpoint was saved, then loads the optimizers.

        Args:
            trained: what `trained_names` returned then.
        """
        states = self._states
        self._states = None
        if states is None:
            return
        params = dict(state.model.named_parameters())
        for name in trained["frozen"]:
            params[name].requires_grad = False
        names = {id(one): name for name, one in params.items()}
        for key, optimizer in state.optimizers.items():
            for group, saved in zip(optimizer.param_groups, trained["groups"][key], strict=True):
                group["params"] = [one for one in group["params"] if names.get(id(one)) in saved]
            optimizer.load_state_dict(states[key])

    def wrappers(self) -> dict[str, Any]:
        """Returns the plain attributes and the state of optimizers that wrap others."""
        found = {}
        for name, outer in zip(self._inner, self._session.mirror.theirs.optimizers, strict=False):
            plain = (bool, int, float, str)
            attributes = {key: one for key, one in vars(outer).items() if isinstance(one, plain)}
            found[name] = {"attributes": attributes, "state": outer.state_dict()["state"]}
        return found

    def put_wrappers(self, saved: Mapping[str, Any]) -> None:
        """Restores what `wrappers` returned; the groups are those of the optimizers inside."""
        for name, outer in zip(self._inner, self._session.mirror.theirs.optimizers, strict=False):
            if name not in saved:
                continue
            vars(outer).update(saved[name]["attributes"])
            params = [one for group in outer.param_groups for one in group["params"]]
            for idx, values in saved[name]["state"].items():
                here = params[idx].device
                outer.state[params[idx]] = {
                    key: one.to(here) if isinstance(one, Tensor) else one
                    for key, one in values.items()
                }


class _Closure:
    """The closure that Composer's trainer passes to an optimizer."""

    def __init__(self, steps: Steps, state: State, closure: Callable[[], Tensor]) -> None:
        self._steps = steps
        self._closure = closure
        assert state.loss is not None
        self._first: Tensor | None = state.loss

    def __call__(self, *, loss_dict: Any = None, ddp_sync: bool = True) -> float:
        """Returns the loss, with the gradients in place: those at hand at first.

        Args:
            loss_dict: where Composer's adds losses up; they are logged once, of the first pass.
            ddp_sync: whether ranks exchange gradients; here they always do.
        """
        first = self._first
        self._first = None
        if first is not None:
            return first.item()
        with torch.enable_grad():
            return self._steps.repeat(self._closure)
