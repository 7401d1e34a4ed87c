"""Logging: the numbers of Composer's trainer itself, and those of callbacks for eventloop's loggers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from composer.core import State as ComposerState
from composer.loggers import LoggerDestination
from composer.utils import dist, get_composer_env_dict
from torch import Tensor

from eventloop import State

_NO_NODE = "unknown because NODENAME environment variable not set"  # as Composer's trainer says


class TrainerLogs:
    """Logs the numbers that Composer's trainer logs, at the same moments and under the same names.

    Only for Composer's loggers: eventloop's get these numbers from the core. The loss is read from the
    device at each batch, so without such loggers nothing is logged.

    Args:
        theirs: Composer's State.
        loggers: Composer's loggers.
    """

    def __init__(self, theirs: ComposerState, loggers: Sequence[LoggerDestination]) -> None:
        self._theirs = theirs
        self._loggers = tuple(loggers)

    def __bool__(self) -> bool:
        return bool(self._loggers)

    def log(self, numbers: dict[str, Any]) -> None:
        """Logs numbers of this batch."""
        step = self._theirs.timestamp.batch.value
        for logger in self._loggers:
            logger.log_metrics(numbers, step)

    def begin(self) -> None:
        """Logs the environment and the seed."""
        environment = get_composer_env_dict()
        num_ranks = dist.get_world_size()
        num_local = dist.get_local_world_size()
        device = type(self._theirs.device).__name__.removeprefix("Device").lower()
        for numbers in (
            {"composer_version": environment["composer_version"]},
            {"composer_commit_hash": str(environment["composer_commit_hash"])},
            {
                "num_nodes": num_ranks // num_local,
                f"num_{device}s_per_node": num_local,
                "node_name": os.environ.get("NODENAME", _NO_NODE),
            },
            {"rank_zero_seed": self._theirs.rank_zero_seed},
        ):
            for logger in self._loggers:
                logger.log_hyperparameters(numbers)

    def epoch(self) -> None:
        """Logs the time at the start of an epoch."""
        if self._loggers:
            self.log({"time/epoch": self._theirs.timestamp.epoch.value})

    def batch(self, num_tokens: int) -> None:
        """Logs the time at the start of a batch."""
        self._times(
            "batch", "sample", "batch_in_epoch", "sample_in_epoch", has_tokens=num_tokens > 0
        )

    def end(self) -> None:
        """Logs the time at the end of a fit."""
        self._times(
            "epoch", "batch", "sample", "batch_in_epoch", "sample_in_epoch",
            has_tokens=self._theirs.timestamp.token.value > 0,
        )  # fmt: skip

    def _times(self, *names: str, has_tokens: bool) -> None:
        timestamp = self._theirs.timestamp
        if self._loggers:
            self.log({f"time/{name}": getattr(timestamp, name).value for name in names})
        if self._loggers and has_tokens:
            self.log({"time/token": timestamp.token.value})
            self.log({"time/token_in_epoch": timestamp.token_in_epoch.value})

    def loss(self, loss: Tensor | None) -> None:
        """Logs the size of microbatches, and the mean loss of a batch; synchronizes with the device."""
        if self._loggers and loss is not None:
            size = self._theirs.device_train_microbatch_size
            self.log({"trainer/device_train_microbatch_size": size})
            numbers = {"loss/train/total": loss.item()}
            self._theirs.total_loss_dict = numbers
            self.log(numbers)


class ToEventloop(LoggerDestination):
    """Passes the numbers that Composer's algorithms and callbacks log to eventloop's loggers.

    Args:
        state: eventloop's State, which receives them.

    Attributes:
        is_heard: whether a fit is running; numbers outside of a fit are dropped.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.is_heard = False

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Logs single numbers; eventloop's loggers accept nothing else."""
        if not self.is_heard:
            return
        for name, value in metrics.items():
            is_number = isinstance(value, int | float)
            if is_number or (isinstance(value, Tensor) and value.numel() == 1):
                self._state.log(name, value)
