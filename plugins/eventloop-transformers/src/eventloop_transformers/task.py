"""The task: a trainer of Hugging Face on eventloop's loop, with its callbacks at their places."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from eventloop import State, Time, hookimpl, is_interruption
from eventloop_transformers.checkpoint_state import Saved
from eventloop_transformers.random_numbers import rng_states, set_rng_states
from eventloop_transformers.step import Step
from eventloop_transformers.step_end import StepEnd
from eventloop_transformers.update_batches import Updates

# Entries of a log that give the time, not a value.
_MOMENT = ("step", "epoch")


@dataclass(frozen=True)
class Fit:
    """The objects and numbers that a trainer has prepared for a `train()`.

    Args:
        model: the model as the trainer calls it, wrapped for several ranks.
        updates: the training data.
        num_epochs: maximum number of epochs.
        first_epoch: the epoch at which a checkpoint of Hugging Face resumes.
        steps_in_epoch: number of batches in an epoch.
        trial, ignore_keys, start_time: arguments for the trainer's methods.
    """

    model: nn.Module
    updates: Updates
    num_epochs: int
    first_epoch: int
    steps_in_epoch: int
    trial: Any
    ignore_keys: list[str] | None
    start_time: float


class TrainerTask:
    """Trains as a trainer of Hugging Face does.

    A batch of the loop is an update: `gradient_accumulation_steps` batches of the data loader, and
    each of them is a microbatch. `forward` runs the trainer's `training_step`, including the backward pass.

    Args:
        trainer: the trainer whose methods are called.
        fit: the objects that the trainer has prepared.

    Attributes:
        evaluation: the trainer's evaluation, which `evaluate` runs; returns its metrics.
    """

    def __init__(self, trainer: Any, fit: Fit) -> None:
        self._trainer = trainer
        self._fit = fit
        self._args = trainer.args
        self._randoms = rng_states()
        self._end = StepEnd(trainer, fit)
        self._saved = Saved(trainer, self._end, trainer._get_output_dir(fit.trial))
        self._step = Step(trainer, fit, self._end)
        for name in Step.hooks:
            setattr(self, name, getattr(self._step, name))
        self._epoch = 0
        self._first_epoch = fit.first_epoch
        self._state: State | None = None
        self.evaluation: Callable[[], Mapping[str, float]] | None = None

    # Losses, counts and buffers differ between ranks.
    state_per_rank = True
    loss_may_broadcast = True  # torch warns about broadcasting, as under transformers' loop

    # Objects that exist already

    @hookimpl
    def build_model(self, state: State) -> nn.Module:
        """Returns the trainer's model."""
        model: nn.Module = self._trainer.model
        return model

    @hookimpl
    def wrap_model(self, state: State) -> nn.Module:
        """Returns the model as prepared by accelerate."""
        return self._fit.model

    @hookimpl
    def build_optimizers(self, state: State) -> Mapping[str, Optimizer]:
        """Returns the trainer's optimizer, without accelerate's wrapper."""
        optimizer = getattr(self._trainer.optimizer, "optimizer", self._trainer.optimizer)
        return {type(optimizer).__name__.lower(): optimizer}

    @hookimpl
    def build_train_dataloader(self, state: State) -> Updates:
        """Returns the trainer's data, in updates."""
        return self._fit.updates

    @hookimpl
    def after_load(self, state: State) -> None:
        """Restores the trainer from a checkpoint."""
        self._saved.put_trainer()

    def state_dict(self) -> dict[str, Any]:
        """Returns the trainer's state, except for model, optimizer and data."""
        return {"first_epoch": self._first_epoch, **self._saved.take()}

    def load_state_dict(self, state: dict[str, Any], version: str) -> None:
        """Stores the state until everything is built."""
        self._first_epoch = state["first_epoch"]
        self._saved.keep(state)

    # The fit

    @hookimpl
    def training_start(self, state: State) -> None:
        """Begins as the trainer's loop does; a resumed run skips the first evaluation."""
        self._state = state
        set_rng_states(self._randoms)
        if not self._saved.is_loaded:
            self._fit.updates.rewind()
        self.begin()

    def begin(self) -> None:
        """Calls `on_train_begin`, and evaluates if a new run should."""
        trainer = self._trainer
        self._fit.model.zero_grad()
        trainer.control = self._handler.on_train_begin(self._args, trainer.state, trainer.control)
        if self._saved.is_loaded:
            self._saved.put_callbacks()
        elif self._args.eval_on_start:
            trainer._evaluate(self._fit.trial, self._fit.ignore_keys, skip_scheduler=True)

    @hookimpl
    def epoch_start(self, state: State) -> None:
        """Calls `on_epoch_begin`, unless the epoch is resumed."""
        self._epoch = state.clock.epoch
        updates = self._fit.updates
        trainer = self._trainer
        updates.epoch = self._epoch_of(state)
        updates.is_under_way = state.resumed
        if state.resumed:
            return
        control = self._handler.on_epoch_begin(self._args, trainer.state, trainer.control)
        trainer.control = control
        self._end.begin_epoch(updates.num_skipped)

    # Last, so that evaluations and checkpoints include the effects of all plugins at the end of a batch.
    @hookimpl(wrapper=True)
    def batch_checkpoint(self, state: State) -> Generator[None, None, None]:
        """Ends the step as the trainer does: `on_step_end`; then it logs, evaluates and saves."""
        yield
        if self._step.is_made:
            self._end.end_step(self._epoch_of(state))
        elif self._end.step < 0:
            self._end.stop_without_data()
        is_over = self._trainer.control.should_training_stop
        if not is_over and state.clock.reached(state.until):
            # Some updates made no step.
            state.until = Time(state.clock.batch + 1, "ba")

    @hookimpl(wrapper=True)
    def epoch_end(self, state: State) -> Generator[None, None, None]:
        """Calls `on_epoch_end`, logs, evaluates and saves, unless the epoch was interrupted."""
        yield
        is_complete = state.clock.epoch != self._epoch
        if is_complete or not is_interruption(state.stop_reason):
            self._end.end_epoch(self._first_epoch + self._epoch)

    @hookimpl
    def fit_end(self, state: State) -> None:
        """Stops passing numbers to plugins."""
        self._state = None

    @hookimpl
    def should_end_epoch(self, state: State) -> bool:
        """Whether a callback's control ends the epoch."""
        return self._step.is_stopped()

    @hookimpl
    def should_stop(self, state: State) -> bool:
        """Whether a callback's control, or the number of epochs, ends the training."""
        is_over = self._epoch_of(state) >= self._fit.num_epochs
        return bool(self._trainer.control.should_training_stop) or is_over

    @hookimpl
    def evaluate(self, state: State) -> dict[str, dict[str, Tensor]]:
        """Evaluates as the trainer does, with the weights that plugins provide."""
        assert self.evaluation is not None
        values = self.evaluation()
        metrics = {name: torch.tensor(float(value)) for name, value in values.items()}
        state.eval_metrics["eval"] = {
            name.removeprefix("eval_"): value for name, value in metrics.items()
        }
        return state.eval_metrics

    def request_checkpoint(self) -> None:
        """Requests a checkpoint after this batch, if the loop is running."""
        if self._state is not None:
            self._state.request_checkpoint()

    def log(self, logs: Mapping[str, Any]) -> None:
        """Passes numbers that the trainer logs to plugins, if the loop is running."""
        if self._state is None:
            return
        for name, value in logs.items():
            if name not in _MOMENT and isinstance(value, int | float):
                self._state.log(name, float(value))

    @property
    def _handler(self) -> Any:
        return self._trainer.callback_handler

    def _epoch_of(self, state: State) -> int:
        return self._first_epoch + state.clock.epoch
