"""The mirror: Composer's own State, Logger and Engine, updated from our State."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from composer.core import Algorithm, Callback, Event, Precision, Timestamp
from composer.core import State as ComposerState
from composer.core import Time as ComposerTime
from composer.devices import Device, DeviceCPU, DeviceGPU
from composer.loggers import Logger, LoggerDestination
from composer.utils import ensure_tuple
from torch import Tensor
from torch.optim import Optimizer

from eventloop import Moment, PluginError, State
from eventloop.devices import kind_of
from eventloop_composer.engine import LeanEngine
from eventloop_composer.logs import ToEventloop, TrainerLogs
from eventloop_composer.saved_state import SavedState
from eventloop_composer.times import Evaluated, timestamp_of, until

_PRECISIONS = {
    "fp32": Precision.FP32,
    "tf32": Precision.FP32,
    "bf16": Precision.AMP_BF16,
    "fp16": Precision.AMP_FP16,
}


class Mirror:
    """Shows eventloop's State to Composer's objects, and applies the changes that they make.

    Args:
        state: eventloop's State; its model exists, its optimizers may not.
        algorithms, callbacks, loggers: Composer's objects, in the order in which they were passed.
        passes: additional passes of Composer, which order algorithms.
        optimizers: the optimizers that exist before the model is changed.
        run_name: name of the run.

    Attributes:
        theirs: Composer's State.
        logger: Composer's Logger.
        engine: Composer's Engine.
        saved: the saved state of all of these.
        logs: the numbers that Composer's trainer itself logs.
        numbers: passes numbers from Composer's Logger to eventloop's loggers.
        since: the moment, on eventloop's clock, at which Composer's time began.
        evaluated: the time of evaluations, which Composer's time excludes.
    """

    def __init__(
        self,
        state: State,
        *,
        algorithms: Sequence[Algorithm],
        callbacks: Sequence[Callback],
        loggers: Sequence[LoggerDestination],
        passes: Any,
        optimizers: Sequence[Optimizer],
        run_name: str,
    ) -> None:
        self.state = state
        self.theirs = ComposerState(
            rank_zero_seed=state.settings.seed,
            model=state.model,
            run_name=run_name,
            device=_device(state),
            precision=_PRECISIONS[state.precision.name],
            optimizers=optimizers,
            algorithms=algorithms,
        )
        self.numbers = ToEventloop(state)
        self.logger = Logger(self.theirs, [*loggers, self.numbers])
        self.logs = TrainerLogs(self.theirs, loggers)
        self.theirs.callbacks = [*loggers, *callbacks]
        self.saved = SavedState(state, self.theirs, callbacks)
        self.engine = LeanEngine(self.theirs, self.logger, passes)
        self.since = Moment(0, 0, 0, 0, 0.0)
        self.evaluated = Evaluated()
        self._loss: Tensor | None = None
        self._max_duration: ComposerTime | None = None
        self._side_s = 0.0  # end of the last batch of an evaluation or prediction
        self._training_loader: tuple[Any, str | None, ComposerTime | None] = (None, None, None)

    def fire(self, event: Event) -> None:
        """Runs an event of Composer's engine, and keeps both States in sync."""
        state = self.state
        theirs = self.theirs
        microbatch = state.microbatch
        batch = state.batch if microbatch is None else microbatch
        outputs = state.outputs
        loss = None if microbatch is None else state.loss
        if batch is not None:
            theirs.batch = batch
        if outputs is not None:
            theirs.outputs = outputs
        if loss is not None and loss is not self._loss:
            theirs.loss = self._loss = loss
        shown = theirs.loss

        self.engine.run_event(event)

        if batch is not None and theirs.batch is not batch:
            if microbatch is None:
                state.batch = theirs.batch
            else:
                state.microbatch = theirs.batch
        if outputs is not None and theirs.outputs is not outputs:
            state.outputs = theirs.outputs
        # A tuple of losses may have been changed element by element.
        if loss is not None and (theirs.loss is not shown or not isinstance(shown, Tensor)):
            state.loss = self.take_loss(theirs.loss)
        if theirs.max_duration is not self._max_duration:
            self._take_duration()

    def take_loss(self, loss: Any) -> Tensor:
        """Returns the value that Composer would backpropagate: the mean of a loss, or the sum of means.

        Args:
            loss: a tensor, several tensors, or tensors by name, as a model of Composer returns it.
        """
        self.theirs.loss = loss
        self._loss = total_of(loss)
        return self._loss

    def advance(self) -> None:
        """Sets Composer's timestamp to the time of eventloop's clock."""
        self.theirs.previous_timestamp = self.theirs.timestamp
        self.theirs.timestamp = self.time_now()

    def end_batch(self) -> None:
        """Advances past a batch; its duration excludes a preceding evaluation."""
        self.evaluated.end_batch(self.state.clock)
        seconds = self.since.seconds + self.evaluated.in_batch_s
        self.since = self.since._replace(seconds=seconds)
        self.advance()

    def restart(self) -> None:
        """Restarts Composer's timestamp; eventloop's clock isn't reset."""
        self.since = self.state.clock.moment()
        self.theirs.timestamp = self.time_now()

    def set_duration(self, duration: ComposerTime | None) -> None:
        """Sets `max_duration` of Composer's State without changing eventloop's duration."""
        self.theirs.max_duration = duration
        self._max_duration = self.theirs.max_duration

    def set_loader(self, loader: Any, label: str, num_batches: int | None = None) -> None:
        """Makes a data loader active; `num_batches` limits its batches, None uses all."""
        length = -1 if num_batches is None else num_batches
        self.theirs.set_dataloader(loader, label, length)

    def begin_side(self, loader: Any, label: str, num_batches: int | None) -> None:
        """Makes the data loader of an evaluation or a prediction active."""
        theirs = self.theirs
        training_loader = (theirs.dataloader, theirs.dataloader_label, theirs.dataloader_len)
        self._training_loader = training_loader
        self._side_s = time.perf_counter()
        self.set_loader(loader, label, num_batches)

    def end_side(self) -> None:
        """Makes the data loader of the training active again."""
        loader, label, length = self._training_loader
        self.theirs.set_dataloader(loader, label)
        if length is not None:
            self.theirs.dataloader_len = length

    def after_side_batch(self, since: Timestamp) -> Timestamp:
        """Returns the timestamp of an evaluation or a prediction, one batch of this rank later."""
        count = self.state.current_count()
        previous_end_s = self._side_s
        self._side_s = time.perf_counter()
        duration = timedelta(seconds=self._side_s - previous_end_s)
        return since.to_next_batch(samples=count.samples, tokens=count.tokens, duration=duration)

    def time_now(self) -> Timestamp:
        """Returns the time of eventloop's clock as Composer's timestamp."""
        return timestamp_of(self.state.clock, self.since, self.evaluated)

    def _take_duration(self) -> None:
        """Applies `max_duration` of Composer's State: stops the run or changes its duration."""
        theirs = self.theirs
        state = self.state
        self._max_duration = theirs.max_duration
        if theirs.max_duration is None:
            return
        if theirs.timestamp >= theirs.max_duration:
            state.request_stop("an algorithm or callback of Composer's asked to stop")
            return
        try:
            state.until = until(theirs.max_duration, self.since)
        except ValueError as error:
            raise PluginError(
                f"Composer's max_duration can't be honoured: {error}",
                fix="let it be a number of epochs, batches, samples or tokens",
            ) from None


def total_of(loss: Any) -> Tensor:
    """Returns the loss that Composer's trainer would backpropagate, shape ().

    A sum is float32, whatever the losses' dtype, as in Composer.
    """
    if isinstance(loss, dict) and "total" in loss:
        loss = loss["total"]
    if isinstance(loss, Tensor) and loss.ndim == 0 and loss.dtype is torch.float32:
        return loss
    losses = ensure_tuple(loss)
    total = torch.zeros((), device=losses[0].device)
    for mean_loss in losses:
        total = total + mean_loss.mean()
    return total.float()


class DeviceAccelerator(DeviceCPU):
    """A device that Composer has no class for: behaves like the CPU, but moves tensors to the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device


def _device(state: State) -> Device:
    if kind_of(state.device).is_host:
        return DeviceCPU()
    try:
        # Creating it changes TF32 for the whole process.
        return DeviceGPU(state.device.index, allow_tf32=state.precision.name != "fp32")
    except ValueError:  # an accelerator that Composer doesn't know
        return DeviceAccelerator(state.device)
