"""A step: the trainer's methods and callbacks from the first batch of an update to the optimizer's step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from eventloop import Count, State, TaskError, hookimpl
from eventloop.toolbox import num_samples
from eventloop_transformers.step_end import StepEnd
from eventloop_transformers.update_batches import Update


class Step:
    """Makes steps as a trainer's loop does: the hooks of a batch.

    Args:
        trainer: the trainer whose methods are called.
        fit: the objects that the trainer has prepared.
        end: accumulates the results of the batches of a step.

    Attributes:
        is_made: whether the current update has all batches of a step.
    """

    hooks = (
        "count_batch",
        "batch_start",
        "should_skip_batch",
        "split_batch",
        "weigh_microbatch",
        "before_forward",
        "forward",
        "loss",
        "backward",
        "after_backward",
        "clip_gradients",
        "should_skip_step",
        "optimizer_step",
        "zero_grad",
        "scheduler_step",
    )

    def __init__(self, trainer: Any, fit: Any, end: StepEnd) -> None:
        self._trainer = trainer
        self._args = trainer.args
        self._end = end
        self._model = fit.model
        self._steps_in_epoch = fit.steps_in_epoch
        self._accelerator = trainer.accelerator
        self._handler = trainer.callback_handler
        self._update = Update((), None)
        self._count = Count(0, 0)
        self.is_made = False

    @hookimpl
    def count_batch(self, state: State, batch: Any) -> Count:
        """Counts the samples of an update, or of a microbatch."""
        samples = batch.samples if isinstance(batch, Update) else [batch]
        num = sum(map(_num_samples, samples))
        if self._count.samples != num:
            self._count = Count(num, 0)
        return self._count

    @hookimpl
    def batch_start(self, state: State) -> None:
        """Stores the current update."""
        self._update = state.batch
        self.is_made = False
        self._trainer.current_gradient_accumulation_steps = len(state.batch.samples)

    @hookimpl
    def should_skip_batch(self, state: State) -> bool:
        """Whether the update is empty, because the data has ended."""
        return not self._update.samples

    @hookimpl
    def split_batch(self, state: State) -> Sequence[Any]:
        """Returns the batches of the update, up to the batch at which a callback stops."""
        return _Until(self._update.samples, self.is_stopped)

    @hookimpl
    def weigh_microbatch(self, state: State) -> float:
        """Returns 1: the trainer already divides its losses by the items of the whole update."""
        return 1.0

    @hookimpl
    def before_forward(self, state: State) -> None:
        """Calls `on_step_begin` at the first batch of a step."""
        trainer = self._trainer
        step = self._end.step + 1
        accumulated = self._args.gradient_accumulation_steps
        self.is_made = (step + 1) % accumulated == 0 or step + 1 == self._steps_in_epoch
        # Set directly: accelerate's public context managers require its own loader (accelerate 1.15).
        self._accelerator.gradient_state._set_sync_gradients(self.is_made)
        if step % accumulated == 0:
            control = self._handler.on_step_begin(self._args, trainer.state, trainer.control)
            trainer.control = control

    @hookimpl
    def forward(self, state: State) -> Any:
        """Runs the trainer's `training_step`; outside of a step, the model."""
        if state.microbatch is None:
            return self._model(**self._trainer._prepare_inputs(state.batch))
        is_last = state.microbatch_idx == len(self._update.samples) - 1
        syncs_each_batch = self._accelerator.gradient_state.plugin_kwargs.get(
            "sync_each_batch", False
        )
        exchanging = (
            contextlib.nullcontext()
            if is_last or syncs_each_batch
            else self._accelerator.no_sync(model=self._model)
        )
        with exchanging:
            return self._trainer.training_step(
                self._model, state.microbatch, self._update.num_items
            )

    @hookimpl
    def loss(self, state: State) -> Tensor:
        """Returns the loss of the step, scaled as if the update were only this batch."""
        loss: Tensor = state.outputs
        return loss * state.num_microbatches if state.num_microbatches > 1 else loss

    @hookimpl
    def backward(self, state: State, loss: Tensor) -> bool:
        """Does nothing: `training_step` has added the gradients."""
        return True

    @hookimpl
    def after_backward(self, state: State) -> None:
        """Adds up loss, operations and tokens; calls `on_substep_end` between the batches of a step."""
        trainer = self._trainer
        inputs = state.microbatch
        self._end.add(state.outputs)
        trainer.current_flos += float(trainer.floating_point_ops(inputs))
        trainer._track_num_input_tokens(inputs)
        if not self.is_made:
            control = self._handler.on_substep_end(self._args, trainer.state, trainer.control)
            trainer.control = control

    @hookimpl
    def clip_gradients(
        self, state: State, optimizers: Mapping[str, Optimizer]
    ) -> dict[str, Tensor]:
        """Clips as the trainer does, and takes the norm."""
        if self.is_made:
            trainer = self._trainer
            norm = None
            if self._args.max_grad_norm > 0:
                norm = trainer._clip_grad_norm(self._model)
            self._end.grad_norm = trainer._get_grad_norm(self._model, grad_norm=norm)
        return {}

    @hookimpl
    def should_skip_step(self, state: State) -> bool:
        """Whether gradients are accumulated further before a step."""
        return not self.is_made

    @hookimpl
    def optimizer_step(
        self, state: State, optimizers: Mapping[str, Optimizer], closure: Callable[[], Tensor]
    ) -> bool:
        """Steps, between the callbacks before and after, and steps the scheduler.

        The scheduler steps before gradients are zeroed: Adafactor's schedule with relative steps reads them.
        """
        trainer = self._trainer
        handler = self._handler
        args = self._args
        trainer.control = handler.on_pre_optimizer_step(args, trainer.state, trainer.control)
        trainer.optimizer.step()
        trainer.control = handler.on_optimizer_step(args, trainer.state, trainer.control)
        self._end.learning_rate = trainer._get_learning_rate()
        if self._accelerator.optimizer_step_was_skipped:
            return False
        self._end.move_rate()
        return True

    @hookimpl
    def zero_grad(self, state: State, optimizers: Mapping[str, Optimizer]) -> bool:
        """Zeroes the gradients, unless they are accumulated further."""
        if self.is_made:
            self._model.zero_grad()
        return True

    @hookimpl
    def scheduler_step(self, state: State, interval: str) -> bool:
        """Does nothing: `optimizer_step` has stepped the scheduler."""
        return True

    def is_stopped(self) -> bool:
        """Whether a callback has stopped the epoch or the training."""
        control = self._trainer.control
        return bool(control.should_epoch_stop or control.should_training_stop)


def _num_samples(batch: Any) -> int:
    """Returns the number of samples in a batch; a batch without tensors, such as prompts, is a list."""
    try:
        return num_samples(batch)
    except TaskError:
        return len(batch)


class _Until(Sequence[Any]):
    """A sequence whose iteration ends early once `is_over()` is true, checked after each item.

    Args:
        items: the items.
        is_over: whether to end the iteration.
    """

    def __init__(self, items: Sequence[Any], is_over: Callable[[], bool]) -> None:
        self._items = items
        self._is_over = is_over

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, idx: Any) -> Any:
        return self._items[idx]

    def __iter__(self) -> Any:
        for idx, item in enumerate(self._items):
            if idx and self._is_over():
                return
            yield item
