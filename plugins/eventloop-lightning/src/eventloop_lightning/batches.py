"""Queries about a batch on its way to the module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from eventloop_lightning.hook_calls import is_overridden

TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def has_transfer(trainer: Any) -> bool:
    """Whether the precision plugin converts batches, or the module or data module overrides their transfer."""
    if type(trainer.precision_plugin).convert_input is not Precision.convert_input:
        return True
    selector = trainer._data_connector._datahook_selector
    owners = [(selector.model, LightningModule), (selector.datamodule, LightningDataModule)]
    return any(
        owner is not None and is_overridden(owner, name, parent)
        for name in TRANSFER
        for owner, parent in owners
    )


def num_samples(batch: Any) -> int:
    """Returns how many samples a batch has: the length of the first tensor that is found."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else 1
    if not isinstance(batch, list | tuple):  # most batches are; checking for a mapping is slower
        batch = list(batch.values()) if isinstance(batch, Mapping) else ()
    for value in batch:
        if num := num_samples(value):
            return num
    return 0
