"""`microbatch_size="auto"`: the largest microbatches that fit into the memory of every rank."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from eventloop.devices import kind_of
from eventloop.errors import counted
from eventloop.rng import KeptGenerators
from eventloop.training.out_of_memory import is_out_of_memory
from eventloop.training.plugin_updates import Accumulate, Passes

if TYPE_CHECKING:
    from eventloop.distributed.processes import Processes
    from eventloop.plugin.plans import Plans
    from eventloop.state import State


class AutoMicrobatch:
    """Repeats a batch from its start in smaller microbatches if a rank ran out of memory.

    Gradients are exchanged only after all ranks have finished their passes, since an exchange that
    failed on one rank couldn't be repeated.

    Args:
        processes: the processes that train together.
        accumulate: adds a batch's gradients to `.grad`.
    """

    def __init__(self, processes: Processes, accumulate: Accumulate) -> None:
        self._accumulate = accumulate
        self._processes = processes

    def __call__(
        self, state: State, hooks: Plans, optimizers: Mapping[str, Optimizer], passes: Passes
    ) -> Tensor:
        """Runs all microbatches; returns the batch's mean loss, detached.

        Raises:
            RuntimeError: a single sample doesn't fit into memory.
        """
        saved_state = ChangedByPasses(state)
        initial_size = state.microbatch_size
        state.attempt = 0
        while True:
            loss, error = self._attempt(state, hooks, optimizers, passes)
            if not self._processes.count_true(error is not None):
                assert loss is not None
                self._processes.average(state, optimizers)
                if state.attempt:
                    _warn(state, initial_size)
                return loss
            self._shrink(state, error)
            # The exception's frames keep the tensors of the failed attempt alive.
            del loss, error
            hooks.zero_grad(state, optimizers)
            saved_state.put_back(state)
            gc.collect()
            kind_of(state.device).release_memory()
            state.attempt += 1

    def _attempt(
        self, state: State, hooks: Plans, optimizers: Mapping[str, Optimizer], passes: Passes
    ) -> tuple[Tensor | None, RuntimeError | None]:
        try:
            return self._accumulate(state, hooks, optimizers, passes), None
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            state.microbatch = state.outputs = state.loss = None
            return None, error.with_traceback(None)

    def _shrink(self, state: State, error: RuntimeError | None) -> None:
        """Halves the microbatch size on all ranks; raises at a size of 1."""
        size = state.microbatch_size or state.current_count().samples
        size = min(self._processes.all_gather(size))
        if size == 1:
            reason = error or RuntimeError("another rank is out of memory with one sample")
            reason.add_note("microbatch_size='auto' was reduced to one sample")
            raise reason
        state.microbatch_size = max(1, size // 2)


class ChangedByPasses:
    """A copy of the state that the passes over a batch change: buffers, generators, metrics."""

    def __init__(self, state: State) -> None:
        buffers = [buffer for buffer in state.model.buffers() if not is_lazy(buffer)]
        self._buffers = [(buffer, buffer.clone()) for buffer in buffers]
        self._generators = KeptGenerators(state.generators().values())
        self._metrics = copy.deepcopy(dict(state.metrics["train"]))

    @torch.no_grad()
    def put_back(self, state: State) -> None:
        """Restores everything, in place."""
        for buffer, value in self._buffers:
            buffer.copy_(value)
        self._generators.put_back()
        state.metrics = {**state.metrics, "train": copy.deepcopy(self._metrics)}


def _warn(state: State, initial_size: int | None) -> None:
    if state.rank == 0:
        size = initial_size or state.current_count().samples
        warnings.warn(
            f"out of memory with microbatches of {counted(size, 'sample')}: from batch {state.clock.batch + 1} on "
            f"they have {state.microbatch_size}",
            stacklevel=2,
        )
