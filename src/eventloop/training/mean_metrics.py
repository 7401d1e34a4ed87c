"""Means over the samples of a set, as metrics: of the loss, and of plain functions.

Imported where there are some, for torchmetrics takes as long to import as torch does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric

from eventloop.devices import kind_of
from eventloop.errors import TaskError, a
from eventloop.training.eval_numbers import weighted

if TYPE_CHECKING:
    from eventloop.state import State

Number = float | Tensor


class MeanOf(Metric):
    """The mean of what a function returns for each batch, added up in float64 on the device.

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

    def __init__(
        self,
        what: str,
        function: Callable[[Any, Any], Any],
        state: State,
        *,
        weigh: Callable[[], Number] | None = None,
        is_higher: bool | None,
    ) -> None:
        super().__init__()
        self._what = what
        self._function = function
        self._state = state
        self._weigh = weigh
        self._is_higher = is_higher
        self._has_value = False
        dtype = kind_of(state.device).sum_dtype
        self.add_state("total", torch.zeros((), dtype=dtype), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros((), dtype=dtype), dist_reduce_fx="sum")
        self.to(state.device)

    @property
    def higher_is_better(self) -> bool | None:  # type: ignore[override]  # an attribute there
        """Whether higher is better; None where that isn't known."""
        return self._is_higher

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
        self._has_value = True
        self.total += weighted(value.to(self.total.dtype).mean(), weight)
        self.weight += weight

    def compute(self) -> Tensor | dict[str, Tensor]:
        """Returns the mean, shape (); {} where no batch had the number."""
        return self.total / self.weight if self._has_value else {}

    def reset(self) -> None:
        """Resets the mean."""
        super().reset()
        self._has_value = False
