"""A trainer of Hugging Face as a task whose loss `eventloop check-loss` can check."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from eventloop import Count, State, hookimpl
from eventloop.toolbox import num_samples

_SAMPLES = 16


def loss_task(trainer: Any, *, batch_size: int = _SAMPLES, pairs: bool = False) -> LossTask:
    """Returns a task with a trainer's loss, only for `eventloop check-loss`.

    Each microbatch goes through the trainer's `training_step`, as a batch of gradient accumulation does, with
    the number of items of the whole batch that the trainer counts.

    Args:
        trainer: an instance of transformers' Trainer or a subclass.
        batch_size: number of samples in the batch that is checked.
        pairs: whether a sample has two rows, one in each half of a batch, as in TRL's DPOTrainer and
            RewardTrainer.
    """
    return LossTask(trainer, batch_size, pairs=pairs)


class LossTask:
    """The loss of a trainer, as it accumulates gradients.

    Args:
        trainer: the trainer whose methods are called.
        batch_size: number of samples in a batch.
        pairs: whether a sample has a row in each half of a batch.
    """

    def __init__(self, trainer: Any, batch_size: int, *, pairs: bool) -> None:
        self._trainer = trainer
        self._batch_size = batch_size
        self._pairs = pairs
        self._num_items: Any = None

    @hookimpl
    def build_model(self, state: State) -> nn.Module:
        """Returns the trainer's model."""
        model: nn.Module = self._trainer.model
        return model

    @hookimpl
    def build_optimizers(self, state: State) -> Mapping[str, Optimizer]:
        """Returns a placeholder optimizer: the check makes no step."""
        return {"sgd": torch.optim.SGD(state.model.parameters(), lr=0.0)}

    @hookimpl
    def build_train_dataloader(self, state: State) -> Any:
        """Returns the trainer's own data loader, with larger batches."""
        # `get_train_dataloader` reads the batch size from this private attribute (transformers 5.23).
        self._trainer._train_batch_size = self._batch_size
        loader = self._trainer.get_train_dataloader()
        return [_paired(batch) for batch in itertools.islice(loader, 1)] if self._pairs else loader

    @hookimpl
    def count_batch(self, state: State, batch: Any) -> Count:
        """Counts the samples."""
        return Count(num_samples(batch), 0)

    @hookimpl
    def batch_start(self, state: State) -> None:
        """Counts the items of the batch, as the trainer does before accumulating gradients."""
        device = self._trainer.args.device
        batch_samples = self._trainer.get_batch_samples(iter([self._rows(state.batch)]), 1, device)
        self._num_items = batch_samples[1]

    @hookimpl
    def weigh_microbatch(self, state: State) -> float:
        """Returns 1: the trainer already divides its losses by the items of the whole batch."""
        return 1.0

    @hookimpl
    def forward(self, state: State) -> Any:
        """Runs the trainer's `training_step`, the backward pass within."""
        self._trainer.current_gradient_accumulation_steps = state.num_microbatches
        return self._trainer.training_step(
            state.wrapped_model, self._rows(state.microbatch), self._num_items
        )

    @hookimpl
    def loss(self, state: State) -> Tensor:
        """Returns the loss of the step, scaled as if the batch were only this microbatch."""
        loss: Tensor = state.outputs
        return loss * state.num_microbatches

    @hookimpl
    def backward(self, state: State, loss: Tensor) -> bool:
        """Does nothing: `training_step` has added the gradients."""
        return True

    def _rows(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a batch in the form that the trainer expects."""
        if not self._pairs:
            return dict(batch)
        return {
            name: torch.cat([value[:, 0], value[:, 1]]) if isinstance(value, Tensor) else value
            for name, value in batch.items()
        }


def _paired(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a batch with the two rows of each sample together, shape (B, 2, ...)."""
    return {
        name: torch.stack(value.chunk(2), 1) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }
