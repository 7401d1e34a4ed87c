"""Scaling of the loss, so that the gradients of fp16 neither vanish nor overflow unseen.

One object for the precisions that need none, one for fp16, with the same methods.
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
# One over it is finite in float32. Halved on and on, the scale would reach 0, and gradients of 0
# divided by it aren't overflow to torch, but NaN in the weights.
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
    """Whether a step was made; known when the device has got so far.

    Asking, as in `if stepped:`, waits for it.

    Args:
        overflow: shape (), 1 where a gradient overflowed, which skips the step.
    """

    def __init__(self, overflow: Tensor) -> None:
        self._overflow = HostCopy([overflow])
        self._answer: bool | None = None

    def __bool__(self) -> bool:
        if self._answer is None:
            self._answer = not self._overflow.numbers()[0]
        return self._answer


class Unscaled:
    """Gradients as they are: every precision but fp16."""

    def enclose(self, hook: str, plan: Plan) -> Plan:
        return plan

    def check(self, model: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
        """Finds nothing wrong."""

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
        """Drops what a run in fp16 wrote."""


class Scaled:
    """Gradients of a scaled loss, by torch's GradScaler.

    All optimizers step for a batch, or none: if the gradients of one overflow, those of the others
    aren't used either, and the result of a closure is dropped.

    Whether a step was made is on its way to the host while the next batch is under way. The
    schedulers follow when it is known: before the next `optimizer_step`, and before whatever
    could miss them, `_KNOWN_BEFORE`.

    Args:
        device: where the scale is kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._scaler = GradScaler(device.type)
        self._one = torch.ones((), device=device)
        self._scale()  # torch makes the tensor of the scale when it is first asked for
        self._flags: list[Tensor] = []
        self._unscaled: set[int] = set()
        self._begun: set[int] = set()
        self._made: StepOutcome | None = None
        self._awaited: bool | StepOutcome = False
        self._num_skipped = 0
        self._scheduler_step: Plan | None = None

    def enclose(self, hook: str, plan: Plan) -> Plan:
        if hook == "train_batch":
            return self._around_batch(plan)
        if hook == "clip_gradients":
            return self._after_unscaling(plan)
        return self._once_known(plan) if hook in _KNOWN_BEFORE else plan

    def check(self, model: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
        """Checks that the gradients can be scaled; raises SettingError if they can't."""
        for name, optimizer in optimizers.items():
            if wants_closure(optimizer):
                raise SettingError(
                    f"precision='fp16', but the optimizer {name!r} is {type(optimizer).__name__}, "
                    "which needs a closure: a step of several losses can't be skipped as a whole",
                    fix="set precision to bf16 or fp32",
                )
        for name, param in model.named_parameters():
            if param.dtype is torch.float16:
                raise SettingError(
                    f"precision='fp16', but the parameter {name!r} is float16 itself, which loses "
                    "small updates",
                    fix="give the model in float32, `model.float()`: autocast computes in float16",
                )

    def backward(self, loss: Tensor) -> None:
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizers: Mapping[str, Optimizer]) -> None:
        """Divides the gradients of these optimizers by the scale; looks whether all are finite."""
        if not self._unscaled.isdisjoint(map(id, optimizers.values())):
            self._forget()  # a closure's call, or an optimizer's second step in one batch
        for optimizer in optimizers.values():
            self._scaler.unscale_(optimizer)
            self._unscaled.add(id(optimizer))
            self._flags += self._flags_of(optimizer)
        if len(self._flags) > 1:
            worst = torch.stack([flag.to(self._one.device) for flag in self._flags]).amax()
            for flag in self._flags:
                flag.copy_(worst)
        self._made = None

    def step(self, optimizer: Optimizer) -> bool | StepOutcome:
        if id(optimizer) not in self._unscaled:
            self.unscale({"": optimizer})
        if not self._flags_of(optimizer):
            step(optimizer)  # it has no gradient
            return True if self._made is None else self._made
        if self._made is None:
            self._made = StepOutcome(self._flags[0].clone())
        # Private, but torch itself uses it: fused optimizers read the flag on the device, the others
        # have to wait. So does a first step: if the device skips it, the momenta of a fused SGD are
        # uninitialised memory (torch 2.13).
        is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        if is_fused and id(optimizer) in self._begun:
            self._scaler.step(optimizer)
        elif self._made:
            step(optimizer)
            self._begun.add(id(optimizer))
        return self._made

    def once_stepped(self, stepped: bool | StepOutcome, scheduler_step: Plan, state: State) -> None:
        """Calls the schedulers later, when it is known whether the step was made."""
        self._await_known(state)
        self._awaited = stepped
        self._scheduler_step = scheduler_step

    def found_inf(self) -> Sequence[Tensor]:
        """Returns the flags of the batch under way, from `clip_gradients` to the end of `train_batch`.

        Each has shape () and is 1 where a gradient overflowed. A strategy whose ranks hold
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
                self._forget()  # of a batch that raised
                self._flags = []
            stepped: bool | StepOutcome = plan(state)
            if self._flags:
                state.log("train/overflow", self._flags[0])
                self._scaler.update()
                if self._num_skipped:
                    self._scaler.update(self._scale().clamp(min=SMALLEST_SCALE))
            elif self._unscaled:
                self._forget()  # no parameter had a gradient
            self._flags = []
            self._unscaled.clear()
            return stepped

        return train_batch

    def _after_unscaling(self, plan: Plan) -> Plan:
        def clip_gradients(state: State, optimizers: Mapping[str, Optimizer]) -> Any:
            self.unscale(optimizers)
            return plan(state, optimizers)

        return clip_gradients

    def _once_known(self, plan: Plan) -> Plan:
        def once_known(state: State, *rest: Any) -> Any:
            self._await_known(state)
            return plan(state, *rest)

        return once_known

    def _await_known(self, state: State) -> None:
        """Learns whether the last step was made; if so, the schedulers follow."""
        stepped = self._awaited
        self._awaited = False
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

    def _forget(self) -> None:
        """Lets optimizers be unscaled once more; the scale stays."""
        self._scaler.update(self._scale())
        self._unscaled.clear()

    def _flags_of(self, optimizer: Optimizer) -> list[Tensor]:
        # Private: torch has no public way to the flags that `unscale_` leaves (torch 2.13).
        return list(self._scaler._found_inf_per_device(optimizer).values())


# Whatever could miss a move of the schedulers.
_KNOWN_BEFORE = ("optimizer_step", "evaluate", "save_checkpoint", "epoch_end", "fit_end")


def _never_finite(num_skipped: int, scale: float) -> NonFiniteError:
    return NonFiniteError(
        f"{num_skipped:,} steps in a row were skipped, since gradients overflowed in fp16; the "
        f"scale of the loss is down to {scale:.3g}",
        fix="set precision to bf16 or fp32; should it stay, look for an infinity in the data, "
        "lower the learning rate, or set clip_norm=1.0",
    )
