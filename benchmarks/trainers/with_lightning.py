"""Lightning: ModelCheckpoint within the epoch, and a data loader with a state, which that needs.

Source: https://lightning.ai/docs/pytorch/stable/common/checkpointing_basic.html
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchdata.stateful_dataloader import StatefulDataLoader
from workload import SEED, Workload, adam

VERSION = lightning.__version__
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(lightning.LightningModule):  # type: ignore[misc]
    """The model with its loss and its optimizer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the loss of a batch."""
        inputs, targets = batch
        return cross_entropy(self.model(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return adam(self.model)


def train(workload: Workload) -> nn.Module:
    """Trains a workload; returns the trained model."""
    lightning.seed_everything(SEED, verbose=False)
    callbacks: list[Any] = []
    last = None
    loader = workload.loader()
    if workload.folder:
        callbacks = [
            ModelCheckpoint(
                workload.folder,
                every_n_train_steps=workload.save_interval,
                save_top_k=-1,
                save_last=True,
            )
        ]
        checkpoint = Path(workload.folder, "last.ckpt")
        last = str(checkpoint) if checkpoint.exists() else None
        loader = workload.loader(StatefulDataLoader)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=workload.num_epochs, callbacks=callbacks, logger=False,
        enable_checkpointing=bool(callbacks), enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Module(workload.build_model())
    trainer.fit(module, loader, ckpt_path=last)
    return module.model
