"""Loss scaling, so that fp16 gradients don't vanish, and steps with overflowed gradients are skipped.

`Scaled` is for fp16, `Unscaled` for all other precisions; both have the same methods.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from eventloop.errors import NonFiniteError, SettingError
from eventloop.forms import FLOAT, NonNegativeInt, as_dict, between, by_name, from_dict, keys
from eventloop.training.logged_numbers import HostCopy
from eventloop.training.optimizers import step, wants_closure

if TYPE_CHECKING:
    from eventloop.plugin.calling import Plan
    from eventloop.state import State

MOST_SKIPPED = 1_000
# Its inverse is finite in float32. If the scale were halved down to 0, gradients of 0 would become NaN
# when they are unscaled, and torch wouldn't count this as overflow.
SMALLEST_SCALE = 2.0**-100


_NUMBER = between(0, 2.0**126, FLOAT)
_POSITIVE = between(math.ulp(0.0), 2.0**126, FLOAT)


def _check_scaler(value: Any, path: str) -> None:
    """Checks the state of torch's GradScaler, whose other keys have no public names."""
    by_name(_NUMBER)(value, path)
    keys(scale=_POSITIVE, growth_factor=_POSITIVE, backoff_factor=_POSITIVE)(value, path)


@dataclass(frozen=True)
class ScaledState:
    """Loss scaling in a checkpoint.

    Attributes:
        scaler: the state of torch's GradScaler.
        num_skipped: the steps that overflow has skipped in a row.
    """

    scaler: Annotated[dict[str, Any], _check_scaler]
    num_skipped: NonNegativeInt


class StepOutcome:
    """Whether an optimizer step was made; evaluating it, as in `if stepped:`, waits for the device.

    Args:
        overflow: shape (); 1 if a gradient overflowed and the step is skipped, otherwise 0.
    """

    def __init__(self, overflow: Tensor) -> None:
        self._overflow = HostCopy([overflow])
        self._answer: bool | None = None

    def __bool__(self) -> bool:
        if self._answer is None:
            self._answer = not self._overflow.numbers()[0]
        return self._answer


class Unscaled:
    """No scaling: for every precision but fp16."""

    def enclose(self, hook: str, plan: Plan) -> Plan:
        return plan

    def check(self, model: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
        """Accepts every model."""

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer) -> bool | StepOutcome:
        step(optimizer)
        return True

    def once_stepped(self, stepped: bool | StepOutcome, scheduler_step: Plan, state: State) -> None:
        if stepped:
            scheduler_step(state, "ba")

    def found_inf(self) -> Sequence[Tensor]:
        return ()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Ignores the state of a run in fp16."""


class Scaled:
    """Scales the loss with torch's GradScaler.

    For each batch, either all optimizers step or none: if the gradients of one optimizer overflow, all
    steps are skipped.

    Whether a step was made is copied to the host during the next batch, so that nothing waits for the
    device. The schedulers step once it is known: before the next `optimizer_step`, or before a hook
    that could read the learning rates or save them, see `_KNOWN_BEFORE`.

    Args:
        device: the device of the scale.
    """

    def __init__(self, device: torch.device) -> None:
        self._scaler = GradScaler(device.type)
        self._one = torch.ones((), device=device)
        self._scale()  # torch creates the tensor of the scale at the first use
        self._flags: list[Tensor] = []
        self._unscaled: set[int] = set()
        self._with_first_step: set[int] = set()
        self._outcome: StepOutcome | None = None
        self._pending_outcome: bool | StepOutcome = False
        self._num_skipped = 0
        self._scheduler_step: Plan | None = None

    def enclose(self, hook: str, plan: Plan) -> Plan:
        if hook == "train_batch":
            return self._around_batch(plan)
        if hook == "clip_gradients":
            return self._after_unscaling(plan)
        return self._after_pending(plan) if hook in _KNOWN_BEFORE else plan

    def check(self, model: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
        """Checks that the gradients can be scaled; raises SettingError if they can't."""
        for name, optimizer in optimizers.items():
            if wants_closure(optimizer):
                raise SettingError(
                    f"precision='fp16', but the optimizer {name!r} is {type(optimizer).__name__}, "
                    "which needs a closure: a step that computes several losses can't be skipped",
                    fix="set precision to bf16 or fp32",
                )
        for name, param in model.named_parameters():
            if param.dtype is torch.float16:
                raise SettingError(
                    f"precision='fp16', but the parameter {name!r} is float16 itself, which loses "
                    "small updates",
                    fix="convert the model with `model.float()`; autocast computes in float16",
                )

    def backward(self, loss: Tensor) -> None:
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizers: Mapping[str, Optimizer]) -> None:
        """Divides the gradients of optimizers by the scale, in place, and checks that all are finite."""
        if not self._unscaled.isdisjoint(map(id, optimizers.values())):
            # A closure was called again, or an optimizer steps twice in a batch.
            self._allow_unscaling()
        for optimizer in optimizers.values():
            self._scaler.unscale_(optimizer)
            self._unscaled.add(id(optimizer))
            self._flags += self._flags_of(optimizer)
        if len(self._flags) > 1:
            # All optimizers share one decision, so each flag becomes the maximum of all flags.
            overflow = torch.stack([flag.to(self._one.device) for flag in self._flags]).amax()
            for flag in self._flags:
                flag.copy_(overflow)
        self._outcome = None

    def step(self, optimizer: Optimizer) -> bool | StepOutcome:
        if id(optimizer) not in self._unscaled:
            self.unscale({"": optimizer})
        if not self._flags_of(optimizer):
            step(optimizer)  # none of its parameters has a gradient
            return True if self._outcome is None else self._outcome
        if self._outcome is None:
            self._outcome = StepOutcome(self._flags[0].clone())
        # Private, but torch's GradScaler uses it, too: fused optimizers read the flag on the device; for
        # others, the host has to wait for it. The first step waits in any case: if the device skipped
        # it, the momenta of a fused SGD would be uninitialized memory (torch 2.13).
        is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        if is_fused and id(optimizer) in self._with_first_step:
            self._scaler.step(optimizer)
        elif self._outcome:
            step(optimizer)
            self._with_first_step.add(id(optimizer))
        return self._outcome

    def once_stepped(self, stepped: bool | StepOutcome, scheduler_step: Plan, state: State) -> None:
        """Steps the schedulers later, once it is known whether the step was made."""
        self._resolve_pending(state)
        self._pending_outcome = stepped
        self._scheduler_step = scheduler_step

    def found_inf(self) -> Sequence[Tensor]:
        """Returns the overflow flags of the batch, from `clip_gradients` to the end of `train_batch`.

        Each has shape () and is 1 if a gradient overflowed, otherwise 0. A strategy whose ranks have
        different gradients takes the maximum over the ranks, in place.
        """
        return tuple(self._flags)

    def state_dict(self) -> dict[str, Any]:
        return as_dict(ScaledState(self._scaler.state_dict(), self._num_skipped))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            saved = from_dict(ScaledState, state)
            self._scaler.load_state_dict(saved.scaler)
            self._num_skipped = saved.num_skipped

    def _around_batch(self, plan: Plan) -> Plan:
        def train_batch(state: State) -> bool | StepOutcome:
            if self._unscaled:
                self._allow_unscaling()  # the previous batch raised
                self._flags = []
            stepped: bool | StepOutcome = plan(state)
            if self._flags:
                state.log("train/overflow", self._flags[0])
                self._scaler.update()
                if self._num_skipped:
                    self._scaler.update(self._scale().clamp(min=SMALLEST_SCALE))
            elif self._unscaled:
                self._allow_unscaling()  # no parameter had a gradient
            self._flags = []
            self._unscaled.clear()
            return stepped

        return train_batch

    def _after_unscaling(self, plan: Plan) -> Plan:
        def clip_gradients(state: State, optimizers: Mapping[str, Optimizer]) -> Any:
            self.unscale(optimizers)
            return plan(state, optimizers)

        return clip_gradients

    def _after_pending(self, plan: Plan) -> Plan:
        def after_pending(state: State, *args: Any) -> Any:
            self._resolve_pending(state)
            return plan(state, *args)

        return after_pending

    def _resolve_pending(self, state: State) -> None:
        """Waits until it is known whether the last step was made; if it was, steps the schedulers."""
        stepped = self._pending_outcome
        self._pending_outcome = False
        if stepped:
            assert self._scheduler_step is not None
            self._num_skipped = 0
            self._scheduler_step(state, "ba")
        elif isinstance(stepped, StepOutcome):
            self._num_skipped += 1
            if self._num_skipped % MOST_SKIPPED == 0:
                raise _never_finite(self._num_skipped, self._scaler.get_scale())

    def _scale(self) -> Tensor:
        scale: Tensor = self._scaler.scale(self._one)
        return scale

    def _allow_unscaling(self) -> None:
        """Lets optimizers be unscaled again, without a change of the scale."""
        self._scaler.update(self._scale())
        self._unscaled.clear()

    def _flags_of(self, optimizer: Optimizer) -> list[Tensor]:
        # Private: torch has no public access to the flags that `unscale_` sets (torch 2.13).
        return list(self._scaler._found_inf_per_device(optimizer).values())


# Hooks that could see or save learning rates before the schedulers have stepped.
_KNOWN_BEFORE = ("optimizer_step", "evaluate", "save_checkpoint", "epoch_end", "fit_end")


def _never_finite(num_skipped: int, scale: float) -> NonFiniteError:
    return NonFiniteError(
        f"{num_skipped:,} steps in a row were skipped, since gradients overflowed in fp16; the "
        f"scale of the loss is down to {scale:.3g}",
        fix="set precision to bf16 or fp32; if that doesn't help, look for infinite values in the "
        "data, lower the learning rate, or set clip_norm=1.0",
    )
