"""Compares the loss of a few samples with that of their halves, where batches are split.

Microbatches train what the whole batch would only if its loss is the mean over the losses of its
parts. A loss that compares samples with each other, a contrastive one, isn't.
"""

from __future__ import annotations

import math
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

# Relative; rounding in the precision of the run is far below, a loss over pairs far above.
_TOLERANCE = {"fp32": 0.01, "tf32": 0.01}
_TOLERANCE_OF_HALF = 0.05


class SplitCheck:
    """Warns, at the first batch that is split, if the loss isn't the mean over its parts.

    Computes the loss of one microbatch and of its halves, in evaluation mode and without gradients,
    which takes no more memory than training on it. What can't be compared is left alone: a model
    that has no loss in evaluation mode, a loss that draws random numbers.

    Args:
        active: has the loss without the plugins' wrappers.
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
        # A resumed run must not run a model once more than one that was never interrupted.
        is_late = state.clock.batch > 0 and state.settings.microbatch_size != "auto"
        # A plugin that splits batches or trains on them by itself answers for what it computes.
        is_owned = any(state.owner(action) != "core" for action in ("split_batch", "train_batch"))
        if is_late or is_owned:
            self._is_done = True
            return
        batch = state.batch
        changed_by_passes = ChangedByPasses(state)
        attributes = _Attributes(state.model)
        try:
            self._comparison = self._begin(state)
        except Exception:  # noqa: BLE001  what is wrong with the batch, training on it will say
            self._is_done = True
        finally:
            attributes.put_back()
            changed_by_passes.put_back(state)
            state.batch = batch
        self._is_done = self._is_done or self._comparison is not None

    # Behind the step, as the losses are on their way to the host while the device computes it.
    @hookimpl
    def batch_checkpoint(self, state: State) -> None:
        if self._comparison is not None and self._comparison.losses.is_ready():
            self._compare(state)

    @hookimpl
    def fit_end(self, state: State) -> None:
        if self._comparison is not None:
            self._compare(state)

    def _begin(self, state: State) -> _Comparison | None:
        """Computes the losses of some samples, twice, and of their halves.

        None if this batch has one sample, so that a later one has to be looked at.
        """
        size = max(2, state.microbatch_size or 2)
        loader = loader_of(state.train_dataloader)
        whole = loader.split(state.batch, size)[0]
        plans = {name: self._active.unwrapped(name, state) for name in ("forward", "loss")}
        weigh = self._active.unwrapped("weigh_microbatch", state)
        count = self._active.unwrapped("count_batch", state)
        with evaluation_mode(state):
            samples = count(state, whole).samples
            fewest_samples = samples
            if any(sharded(param) is not None for param in state.model.parameters()):
                # Every pass of a sharded model is collective.
                fewest_samples = min(state.all_gather(samples))
            if fewest_samples < 2:
                return None
            halves = loader.split(whole, math.ceil(samples / 2))
            losses = []
            weights = []
            for batch in (whole, whole, *halves):
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
        loss, again, *of_halves = numbers[:num]
        _, _, *weights = numbers[num:]
        total = sum(weights)
        if loss != again or not math.isfinite(loss) or not total:
            return
        mean = sum(half * weight for half, weight in zip(of_halves, weights, strict=True)) / total
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
    """Attributes of modules: counters, queues that grow, generators of their own.

    Objects that a pass changes in place, such as lists, aren't copied.
    """

    def __init__(self, model: nn.Module) -> None:
        # A lazy module has another class after its first pass, which is no change of an attribute.
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
    """Losses on their way to the host.

    Args:
        samples: how many the whole has.
        losses: of the whole, of the whole again and of its halves; then the weight of each.
    """

    samples: int
    losses: HostCopy
