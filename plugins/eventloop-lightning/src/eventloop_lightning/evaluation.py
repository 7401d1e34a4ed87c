"""Validation and prediction by Lightning's own loops, inside of eventloop's actions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch import Tensor

from eventloop_lightning.hook_calls import HookCalls

NAME = "val"


def evaluated(trainer: Any, calls: HookCalls) -> dict[str, dict[str, Tensor]]:
    """Runs the validation; returns what it logged, under the name "val"."""
    if trainer.training:
        outputs = _in_fit(trainer)
    else:
        with _as(trainer, TrainerFn.VALIDATING, RunningStage.VALIDATING):
            outputs = trainer.validate_loop.run()
    merged = {name: value for one in outputs for name, value in one.items()}
    return {NAME: {name: one for name, one in merged.items() if isinstance(one, Tensor)}}


def predicted(trainer: Any, dataloader: Any) -> list[Any]:
    """Predicts for a data loader."""
    with _as(trainer, TrainerFn.PREDICTING, RunningStage.PREDICTING):
        loop = trainer.predict_loop
        loop._data_source.instance, loop.return_predictions = dataloader, True
        return list(loop.run() or [])


def _in_fit(trainer: Any) -> list[dict[str, Any]]:
    """Validates amid training, as Lightning's epoch loop does."""
    trainer.validating = True
    connector, loop = trainer._logger_connector, trainer.fit_loop.epoch_loop
    first = connector._first_loop_iter
    if not loop._should_accumulate():
        call._call_lightning_module_hook(trainer, "on_validation_model_zero_grad")
    outputs: list[dict[str, Any]] = loop.val_loop.run()
    trainer.training = True
    connector._first_loop_iter = first
    return outputs


@contextmanager
def _as(trainer: Any, function: TrainerFn, stage: RunningStage) -> Iterator[None]:
    """Has the trainer be what runs this loop, for a while."""
    before = trainer.state.fn, trainer.state.stage
    trainer.state.fn, trainer.state.stage = function, stage
    try:
        yield
    finally:
        trainer.state.fn, trainer.state.stage = before
