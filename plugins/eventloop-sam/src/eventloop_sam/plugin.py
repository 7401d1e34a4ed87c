"""The plugin: when the second gradient is computed, and what is restored after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from eventloop import State, StepOutcome, hookimpl
from eventloop.toolbox import local, wants_closure
from eventloop_sam.draws import Draws
from eventloop_sam.sharpness import ascent, buffers_restored, restored


class Sam:
    """Steps by the gradient at a nearby point of higher loss, which finds flat minima.

    Each step costs two passes over its batch. Events fire only for the first pass.

    Args:
        rho: distance of that point, more than 0: the norm of the step to it over all weights. The paper
            uses 0.05 to 0.2; with `adaptive`, ten times as much.
        every: applies SAM every so many batches; the others are ordinary steps, at half the cost.
        adaptive: whether to measure the distance relative to each weight's size (ASAM).

    Raises:
        TypeError: `rho` is not a number, or `every` is not an integer.
        ValueError: a value is out of range.

    Source: Foret et al. 2021, arXiv:2010.01412; adaptive: Kwon et al. 2021, arXiv:2102.11600.
    """

    def __init__(self, *, rho: float = 0.05, every: int = 1, adaptive: bool = False) -> None:
        if not isinstance(rho, int | float):
            raise TypeError(f"rho={rho!r} is not a number; the paper takes 0.05")
        if not (rho > 0 and math.isfinite(rho)):
            raise ValueError(f"rho={rho!r} isn't a positive number; the paper takes 0.05")
        if not isinstance(every, int):
            raise TypeError(f"every={every!r} is not a number of batches")
        if every < 1:
            raise ValueError(f"every={every!r} isn't a number of batches; 1 is each of them")
        self.rho = rho
        self.every = every
        self.adaptive = adaptive
        self._draws_of_first_pass: Draws | None = None
        self._is_second = False

    @hookimpl
    def unsuitable(self, state: State) -> str | None:
        """Returns why the plugin can't be used: an optimizer that calls a closure, or sparse gradients; None if it can."""
        for name, optimizer in state.optimizers.items():
            if wants_closure(optimizer):
                return f"the optimizer {name!r} is {type(optimizer).__name__}, which takes several gradients a step"
        for name, module in state.model.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                return f"the gradients of {name!r} are sparse, of which torch knows no norm"
        return None

    @hookimpl(wrapper=True)
    def split_batch(self, state: State) -> Generator[None, Sequence[Any], Sequence[Any]]:
        """Saves the states of the random generators before the first pass."""
        if self._is_due(state) and not self._is_second:
            self._draws_of_first_pass = Draws(state.device, state.generators().values())
        return (yield)

    @hookimpl(wrapper=True)
    def optimizer_step(
        self,
        state: State,
        optimizers: Mapping[str, Optimizer],
        closure: Callable[[], Tensor],
    ) -> Generator[None, bool | StepOutcome, bool | StepOutcome]:
        """Replaces the gradients by those at the nearby point."""
        params = [
            param
            for optimizer in optimizers.values()
            for group in optimizer.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        if self._is_due(state) and params:
            first_loss = state.loss
            assert first_loss is not None
            with restored(params), buffers_restored(state.model):
                with torch.no_grad():
                    # Private, as in `ascent` (torch 2.13).
                    local_params = [local(param) for param in params]
                    steps = ascent(params, self.rho, adaptive=self.adaptive)
                    torch._foreach_add_(local_params, steps)
                second_loss = self._second_pass(state, closure)
            state.log("sam/sharpness", second_loss - first_loss, "mean")
        return (yield)

    def _is_due(self, state: State) -> bool:
        return state.clock.batch % self.every == 0

    def _second_pass(self, state: State, closure: Callable[[], Tensor]) -> Tensor:
        """Repeats the batch with the random numbers of the first pass, so both use the same dropout masks."""
        assert self._draws_of_first_pass is not None
        # Afterwards the generators continue from here, as if there had been no second pass.
        draws_after = Draws(state.device, state.generators().values())
        self._draws_of_first_pass.put_back()
        self._is_second = True
        try:
            return closure()
        finally:
            self._is_second = False
            draws_after.put_back()
