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
    """Clips the gradients of optimizers' parameters as the settings say.

    Their norm is summed in the model's order, however they are grouped, as in a plain loop.
    """

    __slots__ = ("_has_shards", "_ordered")

    def __init__(self) -> None:
        self._ordered: dict[tuple[str, ...], tuple[list[nn.Parameter], list[nn.Parameter]]] = {}
        self._has_shards = False

    def __call__(self, state: State, optimizers: Mapping[str, Optimizer]) -> dict[str, Tensor]:
        """Clips gradients in place, by the norm of all, then by value; returns the norm before, to be logged.

        Collective where some are shards, whose norm is a sum over ranks.
        """
        norm = state.settings.clip_norm
        value = state.settings.clip_value
        held: Any = [one for one in self._in_order(state, optimizers) if one.grad is not None]
        logged = {}
        if self._has_shards:
            grads = [param.grad for param in held]
            held = [SimpleNamespace(grad=local(grad)) for grad in grads]  # stand in for them
            if norm is not None:
                logged["grad_norm"] = total_norm(grads)
                nn.utils.clip_grads_with_norm_(held, norm, logged["grad_norm"])
        elif norm is not None:
            logged["grad_norm"] = nn.utils.clip_grad_norm_(held, norm)
        if value is not None:
            nn.utils.clip_grad_value_(held, value)
        return logged

    def _in_order(self, state: State, optimizers: Mapping[str, Optimizer]) -> list[nn.Parameter]:
        grouped = params_of(optimizers.values())
        names = tuple(optimizers)
        known, ordered = self._ordered.get(names, ([], []))
        # Groups may get others, seldom; to compare them takes no call of Python's.
        if len(known) != len(grouped) or not all(map(operator.is_, known, grouped)):
            wanted = {id(one) for one in grouped}
            ordered = [one for one in state.model.parameters() if id(one) in wanted]
            found = {id(one) for one in ordered}
            ordered += [one for one in grouped if id(one) not in found]
            self._ordered[names] = (grouped, ordered)
            self._has_shards |= any(sharded(one) is not None for one in ordered)
        return ordered
