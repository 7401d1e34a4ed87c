"""A trainer's state in eventloop's checkpoints: state, control, callbacks, schedule and counts."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from eventloop import PluginError
from eventloop_transformers.plain_attributes import (
    Attributes,
    NotPlainError,
    OtherModels,
    decoded,
    encoded,
)
from eventloop_transformers.step_end import StepEnd

_FOLDER = re.compile(r"checkpoint-(\d+)")


class Saved:
    """Collects the attributes of a trainer that training changes, and restores them.

    Args:
        trainer: the trainer, before its first callback.
        end: the state of the current epoch.
        output_dir: folder in which the trainer writes its own checkpoints.
    """

    def __init__(self, trainer: Any, end: StepEnd, output_dir: str) -> None:
        self._trainer = trainer
        self._end = end
        self._attributes = Attributes(trainer)
        self._models = OtherModels(trainer)
        self._callbacks = [
            (callback, Attributes(callback)) for callback in trainer.callback_handler.callbacks
        ]
        self._folder = Path(output_dir)
        self._older = sorted(_checkpoints(self._folder))
        self._loaded: Mapping[str, Any] = {}

    @property
    def is_loaded(self) -> bool:
        """Whether the run resumes from a checkpoint."""
        return bool(self._loaded)

    def take(self) -> dict[str, Any]:
        """Returns the trainer's state for a checkpoint."""
        trainer = self._trainer
        end = self._end
        scaler = trainer.accelerator.scaler
        return {
            "state": _encoded("the TrainerState", vars(trainer.state)),
            "control": dict(vars(trainer.control)),
            "attributes": self._attributes.changed(),
            "models": self._models.changed(),
            "callbacks": [
                {"name": type(callback).__name__, "changed": attributes.changed()}
                for callback, attributes in self._callbacks
            ],
            "scheduler": _encoded("the learning rate scheduler", trainer.lr_scheduler.state_dict()),
            "scaler": None if scaler is None else scaler.state_dict(),
            "epoch": [end.step, encoded(end.grad_norm), encoded(end.learning_rate)],
            # Gradients of an update without a step, to which the next update adds.
            "gradients": {
                name: param.grad for name, param in self._params() if param.grad is not None
            },
            "older": self._older,
        }

    def keep(self, state: Mapping[str, Any]) -> None:
        """Stores a state from `take`."""
        self._loaded = state

    def put_trainer(self) -> None:
        """Restores the trainer, if a state was loaded; removes its checkpoints of later steps."""
        if not self._loaded:
            return
        trainer = self._trainer
        loaded = self._loaded
        end = self._end
        for name, value in decoded(loaded["state"]).items():
            setattr(trainer.state, name, value)
        self._attributes.put(loaded["attributes"])
        self._models.put(loaded["models"])
        trainer.lr_scheduler.load_state_dict(decoded(loaded["scheduler"]))
        if loaded["scaler"] is not None and trainer.accelerator.scaler is not None:
            trainer.accelerator.scaler.load_state_dict(loaded["scaler"])
        end.step, end.grad_norm, end.learning_rate = loaded["epoch"]
        self._older = loaded["older"]
        self._put_control()
        if trainer.is_world_process_zero():
            self._remove_later()

    def put_callbacks(self) -> None:
        """Restores callbacks, gradients and the control, after `on_train_begin`."""
        for (callback, attributes), saved in zip(
            self._callbacks, self._loaded["callbacks"], strict=False
        ):
            if type(callback).__name__ == saved["name"]:
                attributes.put(saved["changed"])
        for name, param in self._params():
            if (grad := self._loaded["gradients"].get(name)) is not None:
                param.grad = grad.to(param.device)
        self._put_control()

    def _params(self) -> Iterator[tuple[str, nn.Parameter]]:
        params: Iterator[tuple[str, nn.Parameter]] = self._trainer.model.named_parameters()
        return params

    def _put_control(self) -> None:
        vars(self._trainer.control).update(self._loaded["control"])

    def _remove_later(self) -> None:
        """Removes checkpoints that the run wrote after the step from which it resumes.

        They are written again. The last may be incomplete, and the trainer sorts them by modification time.
        """
        for name, step in _checkpoints(self._folder).items():
            if step > self._trainer.state.global_step and name not in self._older:
                shutil.rmtree(self._folder / name, ignore_errors=True)


def _checkpoints(folder: Path) -> dict[str, int]:
    """Returns the trainer's own checkpoints, with their steps."""
    matches = {path.name: _FOLDER.fullmatch(path.name) for path in folder.glob("checkpoint-*")}
    return {name: int(match[1]) for name, match in matches.items() if match}


def _encoded(subject: str, value: Any) -> Any:
    try:
        return encoded(value)
    except NotPlainError as error:
        raise PluginError(
            f"{subject} can't be saved: it holds a {error}",
            fix="hold numbers, text, tensors and collections of them, or leave run_dir out",
        ) from error
