"""Clipping of gradients, by norm and by value."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from eventloop.training.optimizers import params_of
from eventloop.training.sharded_tensors import local, sharded, total_norm

if TYPE_CHECKING:
    from eventloop.state import State


class GradientClipping:
    """Clips the gradients of optimizers' parameters according to the settings.

    The norm is summed in the order of `model.parameters()`, as in a plain loop, so its last bits don't
    depend on parameter groups.
    """

    __slots__ = ("_has_shards", "_ordered_params")

    def __init__(self) -> None:
        self._ordered_params: dict[
            tuple[str, ...], tuple[list[nn.Parameter], list[nn.Parameter]]
        ] = {}
        self._has_shards = False

    def __call__(self, state: State, optimizers: Mapping[str, Optimizer]) -> dict[str, Tensor]:
        """Clips gradients in place, by their total norm, then by value.

        Collective if gradients are sharded, since their norm is a sum over ranks.

        Returns:
            The numbers to log: `grad_norm`, the norm before clipping, shape (), if `clip_norm` is set.
        """
        norm = state.settings.clip_norm
        value = state.settings.clip_value
        ordered_params = self._params_in_order(state, optimizers)
        params: Any = [param for param in ordered_params if param.grad is not None]
        logged = {}
        if self._has_shards:
            grads = [param.grad for param in params]
            # Stand-ins with this rank's shards, which share memory with the sharded gradients.
            params = [SimpleNamespace(grad=local(grad)) for grad in grads]
            if norm is not None:
                logged["grad_norm"] = total_norm(grads)
                nn.utils.clip_grads_with_norm_(params, norm, logged["grad_norm"])
        elif norm is not None:
            logged["grad_norm"] = nn.utils.clip_grad_norm_(params, norm)
        if value is not None:
            nn.utils.clip_grad_value_(params, value)
        return logged

    def _params_in_order(
        self, state: State, optimizers: Mapping[str, Optimizer]
    ) -> list[nn.Parameter]:
        """Returns the optimizers' parameters in the model's order, then those outside of the model."""
        grouped = params_of(optimizers.values())
        names = tuple(optimizers)
        cached_groups, ordered = self._ordered_params.get(names, ([], []))
        # Plugins may change parameter groups in a run. Comparing with `map` makes no Python call per
        # parameter, so it is cheap enough for every step.
        is_cached = len(cached_groups) == len(grouped)
        if not is_cached or not all(map(operator.is_, cached_groups, grouped)):
            grouped_ids = {id(param) for param in grouped}
            ordered = [param for param in state.model.parameters() if id(param) in grouped_ids]
            ordered_ids = {id(param) for param in ordered}
            ordered += [param for param in grouped if id(param) not in ordered_ids]
            self._ordered_params[names] = (grouped, ordered)
            self._has_shards |= any(sharded(param) is not None for param in ordered)
        return ordered
