"""Validation and prediction by Lightning's own loops, and passes outside of the training loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from eventloop_lightning.hook_calls import HookCalls
from eventloop_lightning.optimization import TrainingStep
from eventloop_lightning.self_log_results import Results, counts_of, put_counts

NAME = "val"


def evaluated(trainer: Any, calls: HookCalls) -> dict[str, dict[str, Tensor]]:
    """Runs the validation; returns its logged numbers, under the name "val"."""
    if trainer.training:
        outputs = _in_fit(trainer)
    else:
        with _as(trainer, TrainerFn.VALIDATING, RunningStage.VALIDATING):
            outputs = trainer.validate_loop.run()
    merged = {name: value for loader_outputs in outputs for name, value in loader_outputs.items()}
    return {NAME: {name: value for name, value in merged.items() if isinstance(value, Tensor)}}


def predicted(trainer: Any, dataloader: Any) -> list[Any]:
    """Predicts for a data loader."""
    with _as(trainer, TrainerFn.PREDICTING, RunningStage.PREDICTING):
        loop = trainer.predict_loop
        loop._data_source.instance = dataloader
        loop.return_predictions = True
        return list(loop.run() or [])


def computed_untrained(trainer: Any, calls: HookCalls, batch: Any) -> Any:
    """Runs the training step on a batch without training on it; logged numbers are discarded."""
    module = trainer.lightning_module
    loop = trainer.fit_loop.epoch_loop
    connector = trainer._logger_connector
    results = loop._results
    hook = connector._current_fx
    # Copied, because metrics accumulate in place.
    counts = apply_to_collection(counts_of(module), Tensor, Tensor.clone)
    loop._results = Results(trainer.strategy.reduce)
    loop._results.batch = batch
    try:
        with _as(trainer, TrainerFn.FITTING, RunningStage.TRAINING):
            return TrainingStep(trainer, calls)(batch, 0)
    finally:
        loop._results = results
        connector._current_fx = hook
        put_counts(module, counts)


def _in_fit(trainer: Any) -> list[dict[str, Any]]:
    """Validates amid training, as Lightning's epoch loop does."""
    trainer.validating = True
    connector = trainer._logger_connector
    loop = trainer.fit_loop.epoch_loop
    is_first_iter = connector._first_loop_iter
    if not loop._should_accumulate():
        call._call_lightning_module_hook(trainer, "on_validation_model_zero_grad")
    outputs: list[dict[str, Any]] = loop.val_loop.run()
    trainer.training = True
    connector._first_loop_iter = is_first_iter
    return outputs


@contextmanager
def _as(trainer: Any, function: TrainerFn, stage: RunningStage) -> Iterator[None]:
    """Sets the trainer's state to this function and stage, inside its context."""
    previous_state = trainer.state.fn, trainer.state.stage
    trainer.state.fn = function
    trainer.state.stage = stage
    try:
        yield
    finally:
        trainer.state.fn, trainer.state.stage = previous_state
