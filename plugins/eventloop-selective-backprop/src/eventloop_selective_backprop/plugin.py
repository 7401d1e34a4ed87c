"""The plugin: on which batches samples are selected, and by whose loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eventloop import EventloopError, SettingError, State, Time, hookimpl
from eventloop.toolbox import as_option, evaluation_mode, num_samples, split
from eventloop_selective_backprop.selection import draw, per_sample, take


class SelectiveBackprop:
    """Trains on those samples of each batch that have the highest loss.

    A pass without gradients computes the loss of each sample. A fixed share of the samples is drawn,
    preferring higher losses, and the model trains on these.

    Args:
        keep_frac: share of the samples that is kept, between 0 and 1.
        start: when selecting begins, in any unit: 2ep, 0.5dur; not set: at once.
        end: when it ends; not set: never.
        interrupt: every so many batches, one is trained on as a whole, 2 or more; 0: never.

    Raises:
        TypeError: `keep_frac` or `interrupt` is not a number.
        ValueError: an option has no such value.

    Source: Jiang et al. 2019, arXiv:1910.00762.
    """

    def __init__(
        self,
        *,
        keep_frac: float = 0.5,
        start: str | Time | None = None,
        end: str | Time | None = None,
        interrupt: int = 0,
    ) -> None:
        if not isinstance(keep_frac, int | float):
            raise TypeError(f"keep_frac={keep_frac!r} is not a number")
        if not 0 < keep_frac < 1:
            raise ValueError(f"keep_frac={keep_frac!r} isn't between 0 and 1")
        if not isinstance(interrupt, int):
            raise TypeError(f"interrupt={interrupt!r} is not a number of batches")
        if interrupt < 0 or interrupt == 1:
            raise ValueError(f"interrupt={interrupt} is neither 0 nor 2 or more")
        self.keep_frac = keep_frac
        self.start = None if start is None else Time(start)
        self.end = None if end is None else Time(end)
        self.interrupt = interrupt
        self._start: Time | None = None
        self._end: Time | None = None

    @hookimpl
    def unsuitable(self, state: State) -> str | None:
        """Returns why the plugin can't be used: the batch or the loss doesn't split into samples; None if it can."""
        owner = state.owner("train_batch")
        if owner != "core":
            return f"train_batch is {owner}'s, which has losses of its own"
        if state.owner("split_batch") == "task":
            return "split_batch is task's: the loss may be one over pairs of samples"
        for name, facts in state.plugin_facts.items():
            if not facts.loss_splits:
                return f"the loss compares the samples of a batch: {name} has loss_splits=False"
        try:
            take(state.batch, torch.zeros(1, dtype=torch.int64, device=state.device))
            losses = self._losses(state)
        except Exception as error:  # noqa: BLE001  training shows it, too, if it asks for a loss
            reason = error.what if isinstance(error, EventloopError) else str(error)
            return f"no loss of each sample can be had: {reason.partition(chr(10))[0]}"
        if losses.isnan().all():
            return "no loss of each sample can be had: that of a batch of one is NaN"
        return None

    @hookimpl
    def after_load(self, state: State) -> None:
        """Resolves `start` and `end`, which may be fractions of the run.

        Raises:
            SettingError: the length of the run isn't known, or no sample would ever be selected.
        """
        self._start = _resolved("start", self.start, state)
        self._end = _resolved("end", self.end, state)
        _check_before("end", self.start, self.end, state)
        _check_before("max_duration", self.start, state.settings.max_duration, state)

    # Samples are selected as they are, not blends of them.
    @hookimpl(before=("mixup", "cutmix"))
    def before_train_batch(self, state: State) -> None:
        """Leaves the drawn samples in the batch, before it is split."""
        num = num_samples(state.batch)
        num_drawn = max(1, round(self.keep_frac * num))
        if num_drawn == num or not self._is_due(state):
            return
        losses = self._losses(state)
        state.log("selective-backprop/loss", losses.nanmean(), "mean")
        beta = 1 / self.keep_frac - 1
        indices = draw(losses, num_drawn, beta, state.generator("selective-backprop"))
        state.batch = take(state.batch, indices)

    def _is_due(self, state: State) -> bool:
        clock = state.clock
        if self._start is not None and not clock.reached(self._start):
            return False
        if self._end is not None and clock.reached(self._end):
            return False
        return not self.interrupt or (clock.batch + 1) % self.interrupt != 0

    def _losses(self, state: State) -> Tensor:
        """Returns the loss of each sample in evaluation mode, which draws and changes nothing."""
        batch = state.batch
        size = state.microbatch_size
        try:
            with evaluation_mode(state):
                microbatches = [batch] if size is None else split(batch, size)
                return torch.cat([_losses_of(microbatch, state) for microbatch in microbatches])
        finally:
            state.batch = batch


def _losses_of(microbatch: Any, state: State) -> Tensor:
    def loss(outputs: Any, batch: Any) -> Tensor:
        state.outputs = outputs
        state.batch = batch
        sample_loss: Tensor = state.call("loss")
        return sample_loss

    state.batch = microbatch
    return per_sample(loss, state.call("forward"), microbatch)


def _resolved(name: str, time: Time | None, state: State) -> Time | None:
    try:
        return time and state.resolve(time)
    except ValueError as error:
        raise SettingError(
            f"selective-backprop.{name}: {error}",
            fix="write it in batches: " + as_option("selective-backprop", **{name: "100ba"}),
        ) from None


def _check_before(name: str, start: Time | None, end: Time | None, state: State) -> None:
    """Raises where a start and an end can be compared, and nothing is between them."""
    if start is None or end is None:
        return
    start_batch, end_batch = (_in_batches(state.resolve(time), state) for time in (start, end))
    if start_batch.unit == end_batch.unit and start_batch.value >= end_batch.value:
        raise SettingError(
            f"selective-backprop.start={start} isn't before {name}={end}: no sample would ever be "
            "selected",
            fix="give an earlier start: "
            + as_option("selective-backprop", start="0.1dur")
            + ", or a later "
            f"{name}",
        )


def _in_batches(time: Time, state: State) -> Time:
    if time.unit == "ep" and state.epoch_length:
        return Time(time.value * state.epoch_length, "ba")
    return time
