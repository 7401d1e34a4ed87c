"""What is asked of a batch on its way to the module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from eventloop_lightning.hook_calls import is_overridden

TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def has_transfer(trainer: Any) -> bool:
    """Returns whether the precision converts batches, or module or data module move them in their own way."""
    if type(trainer.precision_plugin).convert_input is not Precision.convert_input:
        return True
    selector = trainer._data_connector._datahook_selector
    things = [(selector.model, LightningModule), (selector.datamodule, LightningDataModule)]
    return any(
        one is not None and is_overridden(one, name, parent)
        for name in TRANSFER
        for one, parent in things
    )


def num_samples(batch: Any) -> int:
    """Returns how many samples a batch has: the length of the first tensor that is found."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else 1
    if not isinstance(batch, list | tuple):  # which most are: to know a mapping takes longer
        batch = list(batch.values()) if isinstance(batch, Mapping) else ()
    return next((found for one in batch if (found := num_samples(one))), 0)
