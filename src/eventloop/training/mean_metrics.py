"""Means over the samples of a set, as metrics: of the loss, and of plain functions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from eventloop.devices import kind_of
from eventloop.errors import TaskError, a
from eventloop.training.eval_numbers import weighted

if TYPE_CHECKING:
    import torch.distributed as dist

    from eventloop.state import State

Number = float | Tensor


class MeanOf:
    """The mean of what a function returns for each batch, added up in float64 on the device.

    It has what the core uses of a `torchmetrics.Metric`, whose import takes longer than torch's.

    Args:
        what: it is, for messages: "metric 'error'".
        function: takes outputs and targets; returns a tensor of shape (), the mean over the batch,
            or (samples,), a value for each sample; None for a batch without a loss.
        state: knows the batch under way, and the device to add up on.
        weigh: returns the weight in the mean of the batch under way; its samples unless given.
        is_higher: whether higher is better; None where that isn't known.
    """

    total: Tensor
    weight: Tensor
    _update_count: int
    _computed: Tensor | None
    process_group: dist.ProcessGroup | None = None
    dist_sync_fn: Callable[..., list[Tensor]] | None = None

    def __init__(
        self,
        what: str,
        function: Callable[[Any, Any], Any],
        state: State,
        *,
        weigh: Callable[[], Number] | None = None,
        is_higher: bool | None,
    ) -> None:
        self._what = what
        self._function = function
        self._state = state
        self._weigh = weigh
        self.higher_is_better = is_higher
        self.device = state.device
        self.reset()

    @property
    def update_called(self) -> bool:
        """Whether a batch was added since the last reset."""
        return self._update_count > 0

    @property
    def metric_state(self) -> dict[str, Tensor]:
        """The sums, as a checkpoint has them."""
        return {"total": self.total, "weight": self.weight}

    def update(self, outputs: Any, targets: Any) -> None:
        """Adds the batch under way."""
        value = self._function(outputs, targets)
        if value is None and self._weigh:  # a model without a loss
            return
        if not isinstance(value, Tensor | float | int):
            raise TaskError(
                f"{self._what} returned {a(type(value).__name__)}, not a tensor",
                fix="return the mean over the batch, shape (), or a value for each sample",
            )
        value, samples = torch.as_tensor(value).detach(), self._state.current_count().samples
        if value.shape not in ((), (samples,)):
            raise TaskError(
                f"{self._what} returned a tensor of shape {tuple(value.shape)}, which is neither one "
                f"number, (), nor one for each sample of the batch, ({samples},)",
                fix="return the mean over the batch, .mean(), or a value for each sample",
            )
        weight = self._weigh() if self._weigh else samples
        self._update_count += 1
        self.total = self.total + weighted(value.to(self.total.dtype).mean(), weight)
        self.weight = self.weight + weight
        self._computed = None

    def compute(self) -> Tensor | dict[str, Tensor]:
        """Returns the mean, shape (); {} where no batch had the number.

        Collective where the ranks see different samples, at the first call after an update.
        """
        if not self.update_called:
            return {}
        if self._computed is None:
            sums = torch.stack([self.total, self.weight])
            if self.dist_sync_fn is not None:
                sums = torch.stack(self.dist_sync_fn(sums, self.process_group)).sum(0)
            self._computed = sums[0] / sums[1]
        return self._computed

    def reset(self) -> None:
        """Resets the mean."""
        zero = torch.zeros((), dtype=kind_of(self.device).sum_dtype, device=self.device)
        self.total = self.weight = zero
        self._update_count = 0
        self._computed = None

    def __deepcopy__(self, memo: Any) -> Self:
        """Returns a copy; its sums are its own, as they aren't changed in place."""
        return copy.copy(self)
