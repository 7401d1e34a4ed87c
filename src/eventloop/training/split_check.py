"""Compares the loss of a few samples with the losses of their halves, if batches are split.

Training with microbatches equals training with whole batches only if a batch's loss is the mean of its
microbatches' losses. A loss that compares samples with each other, such as a contrastive loss, isn't.
"""

from __future__ import annotations

import math
import operator
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from eventloop.data.loaders import loader_of
from eventloop.errors import counted
from eventloop.hook_markers import hookimpl
from eventloop.training.auto_microbatch import ChangedByPasses
from eventloop.training.evaluation import evaluation_mode
from eventloop.training.logged_numbers import HostCopy
from eventloop.training.running_means import on_device
from eventloop.training.sharded_tensors import sharded

if TYPE_CHECKING:
    from eventloop.plugin.plans import ActivePlugins
    from eventloop.state import State

# Relative tolerances: rounding errors are far smaller, and a loss over pairs differs by far more.
_TOLERANCE = {"fp32": 0.01, "tf32": 0.01}
_TOLERANCE_OF_HALF = 0.05


class SplitCheck:
    """Warns at the first split batch if its loss isn't the mean of its microbatches' losses.

    Computes the loss of a microbatch and of its halves, in evaluation mode and without gradients, which
    takes no more memory than training on it. Gives no warning if the losses can't be compared: if the
    model has no loss in evaluation mode, or the loss draws random numbers.

    Args:
        active: the plugins of the run; provides forward and loss without the plugins' wrappers.
    """

    __slots__ = ("_active", "_comparison", "_is_done")

    def __init__(self, active: ActivePlugins) -> None:
        self._active = active
        self._is_done = False
        self._comparison: _Comparison | None = None

    @hookimpl
    def batch_start(self, state: State) -> None:
        if self._is_done or state.microbatch_size is None:
            return
        # A resumed run must call the model exactly as often as an uninterrupted run.
        is_late = state.clock.batch > 0 and state.settings.microbatch_size != "auto"
        # A plugin that splits batches or implements `train_batch` is responsible for its losses.
        is_owned = any(state.owner(action) != "core" for action in ("split_batch", "train_batch"))
        if is_late or is_owned:
            self._is_done = True
            return
        batch = state.batch
        changed_by_passes = ChangedByPasses(state)
        attributes = _Attributes(state.model)
        try:
            self._comparison = self._begin(state)
        except Exception:  # noqa: BLE001  training on the batch will raise the same error
            self._is_done = True
        finally:
            attributes.put_back()
            changed_by_passes.put_back(state)
            state.batch = batch
        self._is_done = self._is_done or self._comparison is not None

    # After the step: the losses are copied to the host while the device computes the step.
    @hookimpl
    def batch_checkpoint(self, state: State) -> None:
        if self._comparison is not None and self._comparison.losses.is_ready():
            self._compare(state)

    @hookimpl
    def fit_end(self, state: State) -> None:
        if self._comparison is not None:
            self._compare(state)

    def _begin(self, state: State) -> _Comparison | None:
        """Starts to compute the losses of a microbatch, twice, and of its halves.

        Returns None if this batch has a single sample, so a later batch has to be checked.
        """
        size = max(2, state.microbatch_size or 2)
        loader = loader_of(state.train_dataloader)
        microbatch = loader.split(state.batch, size)[0]
        plans = {name: self._active.unwrapped(name, state) for name in ("forward", "loss")}
        weigh = self._active.unwrapped("weigh_microbatch", state)
        count = self._active.unwrapped("count_batch", state)
        with evaluation_mode(state):
            samples = count(state, microbatch).samples
            fewest_samples = samples
            if any(sharded(param) is not None for param in state.model.parameters()):
                # A pass of a sharded model is collective, so all ranks must decide alike.
                fewest_samples = min(state.all_gather(samples))
            if fewest_samples < 2:
                return None
            halves = loader.split(microbatch, math.ceil(samples / 2))
            losses = []
            weights = []
            for batch in (microbatch, microbatch, *halves):
                state.batch = batch
                state.outputs = plans["forward"](state)
                losses.append(plans["loss"](state))
                weights.append(on_device(weigh(state), state.device).reshape(()))
        return _Comparison(samples, HostCopy([*losses, *weights]))

    def _compare(self, state: State) -> None:
        comparison = self._comparison
        self._comparison = None
        assert comparison is not None
        numbers = comparison.losses.numbers()
        num = len(numbers) // 2
        # A loss that differs between two passes over the same samples is random.
        loss, repeated_loss, *losses_of_halves = numbers[:num]
        _, _, *weights = numbers[num:]
        total = sum(weights)
        if loss != repeated_loss or not math.isfinite(loss) or not total:
            return
        weighted_losses = map(operator.mul, losses_of_halves, weights)
        mean = sum(weighted_losses) / total
        tolerance = _TOLERANCE.get(state.precision.name, _TOLERANCE_OF_HALF)
        if not math.isfinite(mean) or math.isclose(loss, mean, rel_tol=tolerance, abs_tol=1e-6):
            return
        if state.rank == 0:
            warnings.warn(
                f"microbatches of {state.microbatch_size} train something else than whole batches: the "
                f"loss of {counted(comparison.samples, 'sample')} is {loss:.4g}, and the mean of the "
                f"losses of their halves {mean:.4g}. If the loss compares samples of a batch with each "
                "other, write Task(loss_splits=False) and train with eventloop-gradcache, which joins "
                "the outputs of microbatches before the loss; if it is a sum or a weighted mean, return "
                "the mean or write Task(loss_weight=...). `eventloop check-loss TASK` "
                "(eventloop-check) examines it",
                stacklevel=2,
            )


class _Attributes:
    """A copy of the attributes of modules, such as counters, and of their random generators.

    Objects that a pass changes in place, such as lists, aren't copied.
    """

    def __init__(self, model: nn.Module) -> None:
        # The first pass changes the class of a lazy module, which can't be undone here.
        modules = [module for module in model.modules() if not _is_lazy(module)]
        self._values = [
            (values, dict(values))
            for module in modules
            for values in (vars(module), module._buffers)
        ]
        generators = {
            id(value): value
            for module in modules
            for value in vars(module).values()
            if isinstance(value, torch.Generator)
        }
        self._generators = [(generator, generator.get_state()) for generator in generators.values()]

    def put_back(self) -> None:
        for values, previous_values in self._values:
            for name in values.keys() - previous_values.keys():
                del values[name]
            values.update(previous_values)
        for generator, generator_state in self._generators:
            generator.set_state(generator_state)


def _is_lazy(module: nn.Module) -> bool:
    return isinstance(module, LazyModuleMixin)


@dataclass(frozen=True)
class _Comparison:
    """Losses that are being copied to the host.

    Args:
        samples: the number of samples of the microbatch.
        losses: the loss of the microbatch, its loss in a second pass, and the losses of its halves;
            then the weight of each.
    """

    samples: int
    losses: HostCopy
