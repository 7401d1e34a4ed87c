"""Writes the lines that transformers' loop logs before the first step."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.trainer_pt_utils import get_model_param_count
from transformers.utils import logging

from eventloop_transformers.update_batches import Resumed

# The logger of transformers' trainer, so that `log_level` counts.
logger = logging.get_logger("transformers.trainer")


def log_sizes(trainer: Any, model: nn.Module, sizes: tuple[int, ...], resumed: Resumed) -> None:
    """Logs the size of the training, in the format of transformers 5.23.

    Args:
        trainer: the trainer.
        model: the model, possibly wrapped.
        sizes: the result of `set_initial_training_values`.
        resumed: the position at which training resumes.
    """
    args = trainer.args
    per_device = trainer.args.per_device_train_batch_size
    num_epochs, num_updates, num_samples, _, num_in_batch, _, max_steps = sizes
    logger.info("***** Running training *****")
    logger.info(f"  Num examples = {num_samples:,}")
    logger.info(f"  Num Epochs = {num_epochs:,}")
    logger.info(f"  Num update steps per epoch = {num_updates:,}")
    logger.info(f"  Instantaneous batch size per device = {per_device:,}")
    if per_device != trainer._train_batch_size:
        batch_size = f"{trainer._train_batch_size:,}"
        logger.info(
            f"  Training with DataParallel so batch size has been adjusted to: {batch_size}"
        )
    logger.info(
        f"  Total train batch size (w. parallel, distributed & accumulation) = {num_in_batch:,}"
    )
    logger.info(f"  Gradient Accumulation steps = {args.gradient_accumulation_steps}")
    logger.info(f"  Total optimization steps = {max_steps:,}")
    trained = get_model_param_count(model, trainable_only=True)
    logger.info(f"  Number of trainable parameters = {trained:,}")
    if resumed.path is None:
        return
    logger.info(
        f"  Resuming training from checkpoint with epoch {resumed.epoch} and global step "
        f"{trainer.state.global_step}"
    )
    if not args.ignore_data_skip:
        logger.info(
            f"  Fast-forwarding the dataloader past {resumed.epoch} epochs and"
            f" {resumed.num_batches} batches to resume from the exact training state."
        )
