"""Hugging Face's Trainer, with `save_steps` and `resume_from_checkpoint`.

Source: https://huggingface.co/docs/transformers/main/trainer
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.trainer_utils import get_last_checkpoint
from workload import BATCH_SIZE, LEARNING_RATE, SEED, Workload

VERSION = transformers.__version__


class WithLoss(nn.Module):
    """A model that returns its loss, as the Trainer expects."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Returns the loss of a batch."""
        outputs = self.model(inputs)
        return {"loss": cross_entropy(outputs, labels), "logits": outputs}


def collate(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Returns a batch as keyword arguments of `forward`."""
    inputs, labels = zip(*samples, strict=True)
    return {"inputs": torch.stack(inputs), "labels": torch.stack(labels)}


def train(workload: Workload) -> nn.Module:
    """Trains a workload; returns the trained model."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = workload.folder or scratch
        arguments: dict[str, Any] = {"save_strategy": "no"}
        if workload.folder:
            arguments = {"save_strategy": "steps", "save_steps": workload.save_interval}
        options = transformers.TrainingArguments(
            folder, num_train_epochs=workload.num_epochs, per_device_train_batch_size=BATCH_SIZE,
            learning_rate=LEARNING_RATE, lr_scheduler_type="constant", max_grad_norm=0, seed=SEED,
            dataloader_drop_last=True, use_cpu=True, report_to="none", logging_strategy="no",
            disable_tqdm=True, dataloader_pin_memory=False, remove_unused_columns=False,
            optim="adamw_torch", weight_decay=0, adam_epsilon=1e-8, **arguments,
        )  # fmt: skip
        transformers.set_seed(SEED)
        model = WithLoss(workload.build_model())
        trainer = transformers.Trainer(
            model, options, train_dataset=workload.dataset, data_collator=collate
        )
        last = get_last_checkpoint(workload.folder) if workload.folder else None
        with contextlib.redirect_stdout(io.StringIO()):  # a summary at the end
            trainer.train(resume_from_checkpoint=last)
    return model.model
