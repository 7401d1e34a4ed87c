"""The plugin: when weights are averaged, and where the average replaces the weights."""

from __future__ import annotations

import itertools
import math
import sys
import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from eventloop import SettingError, State, TaskError, Time, hookimpl
from eventloop.toolbox import Microbatches, as_option, counted
from eventloop_swa.statistics import batch_norms, estimating
from eventloop_swa.swap import adopt_buffers, in_place


class Swa:
    """Evaluates, predicts and exports with the mean of the weights of the last epochs.

    Training continues with the original weights. Before the average is used, batch norms get its
    statistics from a pass over the training data.

    Args:
        start: when averaging begins, in any unit of time: "0.75dur", "10ep", "5000ba".
        interval: how often the weights are added to the mean: "1ep", "500ba".
        lr: learning rate from the start on, for all optimizers; not set: the task's schedule continues.
        bn_batches: number of training batches for the statistics of batch norms, on each rank; not set:
            a whole epoch.

    Raises:
        TypeError: `lr` or `bn_batches` is not a number.
        ValueError: a value is out of range.

    Source: Izmailov et al. 2018, arXiv:1803.05407.
    """

    def __init__(
        self,
        *,
        start: str = "0.75dur",
        interval: str = "1ep",
        lr: float | None = None,
        bn_batches: int | None = None,
    ) -> None:
        if lr is not None and not isinstance(lr, int | float):
            raise TypeError(f"lr={lr!r} is not a number; 0.05, say")
        if lr is not None and not (lr > 0 and math.isfinite(lr)):
            raise ValueError(f"lr={lr!r} isn't a positive number; 0.05, say")
        if bn_batches is not None and not isinstance(bn_batches, int):
            raise TypeError(f"bn_batches={bn_batches!r} is not a number of batches; 100, say")
        if bn_batches is not None and bn_batches < 1:
            raise ValueError(f"bn_batches={bn_batches} isn't 1 or more; 100, say")
        self.start = Time(start)
        self.interval = Time(interval)
        self.lr = lr
        self.bn_batches = bn_batches
        self.num_averaged = 0
        self._start = self.start
        self._interval = self.interval
        self._averaged: AveragedModel | None = None
        self._has_statistics = False
        self._loaded: dict[str, Any] = {}

    @hookimpl
    def unsuitable(self, state: State) -> str | None:
        """Returns why the plugin can't be used: no copy of the model, no second pass, or no start; None if it can."""
        if _is_sharded(state):
            return "the model's weights are sharded, and it needs a copy of the whole model"
        if self.start.unit == "dur" and state.duration is None:
            return f"it starts at {self.start}, but max_duration is not set"
        try:
            _averaged_copy(state.model)
        except Exception as error:  # noqa: BLE001  whatever a module of the model raises
            reason, *_ = str(error).splitlines() or [type(error).__name__]
            return f"the model can't be copied: {reason}"
        if batch_norms(state.model):
            try:
                with state.training_pass():
                    pass
            except TaskError as error:
                return f"the model's batch norms need the training data once more, but {error.what}"
        return None

    @hookimpl
    def after_load(self, state: State) -> None:
        """Copies the model; a resumed run continues from the saved mean."""
        loaded = self._loaded
        self._loaded = {}
        self._start = _start(self.start, state)
        self._interval = _interval(self.interval, state)
        self._averaged = _averaged_copy(state.model)
        self._go_on_from(loaded, self._averaged)

    @hookimpl(wrapper=True)
    def restore_model(self, state: State) -> Generator[None, bool, bool]:
        """Replaces the mean when other weights are loaded: with their mean, if they have one."""
        loaded = self._loaded
        self._loaded = {}
        is_restored = yield
        self.num_averaged = 0
        if self._averaged is not None:
            self._averaged.n_averaged.zero_()
            self._go_on_from(loaded, self._averaged)
        return is_restored

    @hookimpl(wrapper=True)
    def scheduler_step(self, state: State) -> Generator[None, bool, bool]:
        """Holds the learning rates at `lr` once `start` is reached, overriding the schedulers."""
        is_done = yield
        if self.lr is not None and state.clock.reached(self._start):
            _set_rates(state, self.lr)
        return is_done

    # torch's AveragedModel reads its counter on the host: only in hooks outside of a step.
    @hookimpl(trylast=True)
    def epoch_end(self, state: State) -> None:
        """Adds the weights to the mean, if the interval is in epochs."""
        if self._interval.unit == "ep":
            self._average(state)

    @hookimpl
    def batch_checkpoint(self, state: State) -> None:
        """Adds the weights to the mean, if the interval is in another unit."""
        if self._interval.unit != "ep":
            self._average(state)

    @hookimpl
    def training_end(self, state: State) -> None:
        """Warns if the run ended before anything was averaged."""
        if state.rank == 0 and state.stop_reason is None and not self.num_averaged:
            warnings.warn(
                f"swa has averaged nothing: it starts at {self._start}, every {self._interval}, and "
                f"the run has ended after {counted(state.clock.epoch, 'epoch')} and "
                f"{counted(state.clock.batch, 'batch', 'batches')}; give another start or "
                "interval, " + as_option("swa", start="0.5dur", interval="10ba"),
                stacklevel=2,
            )

    # Inside ema's wrapper: with both plugins active, swa's mean is evaluated.
    @hookimpl(wrapper=True, after="ema")
    def evaluate(self, state: State) -> Generator[None, Any, Any]:
        """Evaluates with the mean."""
        with self._in_place(state):
            return (yield)

    @hookimpl(wrapper=True, after="ema")
    def predict(self, state: State) -> Generator[None, Any, Any]:
        """Predicts with the mean."""
        with self._in_place(state):
            return (yield)

    @hookimpl(wrapper=True, after="ema")
    def export(self, state: State) -> Generator[None, Path, Path]:
        """Exports the mean."""
        with self._in_place(state):
            return (yield)

    def state_dict(self) -> dict[str, Any]:
        """Returns the averaged model, if any, and whether its batch norm statistics are up to date."""
        averaged = self._averaged if self.num_averaged else None
        return {
            "averaged": {} if averaged is None else dict(averaged.state_dict()),
            "num_averaged": self.num_averaged,
            "has_statistics": self._has_statistics,
        }

    def load_state_dict(self, state: dict[str, Any], version: str) -> None:
        """Stores the mean until the model's weights are loaded."""
        self._loaded = state

    def _go_on_from(self, loaded: dict[str, Any], averaged: AveragedModel) -> None:
        if loaded and loaded["num_averaged"]:
            _take_shapes(averaged, loaded["averaged"])
            averaged.load_state_dict(loaded["averaged"])
            self.num_averaged = loaded["num_averaged"]
            self._has_statistics = loaded["has_statistics"]

    def _average(self, state: State) -> None:
        if state.clock.reached(self._start) and state.clock.crossed(self._interval):
            assert self._averaged is not None
            adopt_buffers(self._averaged.module, state.model)
            self._averaged.update_parameters(state.model)
            self.num_averaged += 1
            self._has_statistics = False

    @contextmanager
    def _in_place(self, state: State) -> Iterator[None]:
        if not self.num_averaged:
            yield
            return
        assert self._averaged is not None
        if not self._has_statistics:
            self._estimate(state, self._averaged)
            self._has_statistics = True
        with in_place(state.model, self._averaged.module):
            yield

    def _estimate(self, state: State, averaged: AveragedModel) -> None:
        """Estimates the statistics of the averaged model's batch norms."""
        norms = batch_norms(state.model)
        if not norms:
            return
        state.microbatch = None  # a failed fit may have left a microbatch
        with in_place(state.model, averaged.module), estimating(state.model):
            with torch.no_grad(), state.training_pass() as batches:
                for batch in _together(itertools.islice(batches, self.bn_batches), state):
                    for state.batch in batch if isinstance(batch, Microbatches) else [batch]:
                        state.call("forward")
                    state.batch = None
            for name, norm in norms.items():
                _take_statistics(averaged.module.get_submodule(name), norm, state)


def _averaged_copy(model: nn.Module) -> AveragedModel:
    """Returns a copy with parameters in float32 or wider: narrower ones would round small changes away."""
    if not any(map(_is_narrow, model.parameters())):
        return AveragedModel(model)
    # torch's default average can't mix dtypes (torch 2.13).
    averaged = AveragedModel(
        model, avg_fn=lambda mean, param, num: mean + (param - mean) / (num + 1)
    )
    for param in filter(_is_narrow, averaged.module.parameters()):
        param.data = param.data.float()
    return averaged


def _take_shapes(averaged: AveragedModel, saved: Mapping[str, Any]) -> None:
    """Resizes the mean's buffers to their saved shapes."""
    for name, buffer in list(averaged.named_buffers()):
        if name in saved and saved[name].shape != buffer.shape:
            path, _, attribute = name.rpartition(".")
            setattr(averaged.get_submodule(path), attribute, torch.empty_like(saved[name]))


def _is_narrow(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() < 4


def _set_rates(state: State, lr: float) -> None:
    for optimizer in state.optimizers.values():
        for group in optimizer.param_groups:
            # A tensor (as with `capturable`) must stay the same object.
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


def _is_sharded(state: State) -> bool:
    # Sharding has imported this already; importing it takes a second, so nothing else does.
    tensors = sys.modules.get("torch.distributed.tensor")
    params = state.model.parameters()
    return tensors is not None and any(isinstance(param, tensors.DTensor) for param in params)


def _together(batches: Iterator[Any], state: State) -> Iterator[Any]:
    """Yields batches while every rank has one: a batch norm over all ranks waits for every rank."""
    for batch in itertools.chain(batches, itertools.repeat(None)):
        if state.count_true(batch is not None) < state.world_size:
            return
        yield batch


def _take_statistics(target: Any, norm: Any, state: State) -> None:
    """Sets a batch norm's statistics to the mean over all ranks."""
    local_statistics = norm.running_mean.cpu(), norm.running_var.cpu()
    means, variances = zip(*state.all_gather(local_statistics), strict=True)
    target.running_mean.copy_(torch.stack(means).mean(0))
    target.running_var.copy_(torch.stack(variances).mean(0))
    target.num_batches_tracked.copy_(norm.num_batches_tracked)


def _start(start: Time, state: State) -> Time:
    """Returns a start that a clock can reach: rounded up to an epoch if the epoch's length isn't known."""
    duration = state.duration
    if start.unit == "dur" and duration is None:
        return start
    try:
        return state.resolve(start)
    except ValueError:
        duration_value = duration.value if start.unit == "dur" and duration is not None else 1
        return Time(math.ceil(start.value * duration_value), "ep")


def _interval(interval: Time, state: State) -> Time:
    try:
        return state.resolve(interval)
    except ValueError as error:
        raise SettingError(
            f"swa.interval: {error}", fix="write " + as_option("swa", interval="1ep")
        ) from None
