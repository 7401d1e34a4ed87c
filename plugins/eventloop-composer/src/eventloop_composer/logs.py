"""What is logged: by Composer's trainer itself, and by callbacks for our loggers, too."""

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
    """Logs what Composer's trainer logs, at the same moments and by the same names.

    To Composer's loggers alone: ours get these numbers from the core. A loss is read from the device
    for them at each batch, so that without them nothing is.

    Args:
        theirs: Composer's State.
        loggers: Composer's.
    """

    def __init__(self, theirs: ComposerState, loggers: Sequence[LoggerDestination]) -> None:
        self._theirs = theirs
        self._loggers = tuple(loggers)

    def __bool__(self) -> bool:
        return bool(self._loggers)

    def log(self, numbers: dict[str, Any]) -> None:
        """Logs numbers of this batch."""
        step = self._theirs.timestamp.batch.value
        for one in self._loggers:
            one.log_metrics(numbers, step)

    def begin(self) -> None:
        """Logs what runs where, and the seed."""
        found = get_composer_env_dict()
        num_ranks = dist.get_world_size()
        num_local = dist.get_local_world_size()
        device = type(self._theirs.device).__name__.removeprefix("Device").lower()
        for numbers in (
            {"composer_version": found["composer_version"]},
            {"composer_commit_hash": str(found["composer_commit_hash"])},
            {
                "num_nodes": num_ranks // num_local,
                f"num_{device}s_per_node": num_local,
                "node_name": os.environ.get("NODENAME", _NO_NODE),
            },
            {"rank_zero_seed": self._theirs.rank_zero_seed},
        ):
            for one in self._loggers:
                one.log_hyperparameters(numbers)

    def epoch(self) -> None:
        """Logs where an epoch begins."""
        if self._loggers:
            self.log({"time/epoch": self._theirs.timestamp.epoch.value})

    def batch(self, num_tokens: int) -> None:
        """Logs where a batch of so many tokens begins."""
        self._times(
            "batch", "sample", "batch_in_epoch", "sample_in_epoch", has_tokens=num_tokens > 0
        )

    def end(self) -> None:
        """Logs where a fit ends."""
        self._times(
            "epoch", "batch", "sample", "batch_in_epoch", "sample_in_epoch",
            has_tokens=self._theirs.timestamp.token.value > 0,
        )  # fmt: skip

    def _times(self, *names: str, has_tokens: bool) -> None:
        now = self._theirs.timestamp
        if self._loggers:
            self.log({f"time/{name}": getattr(now, name).value for name in names})
        if self._loggers and has_tokens:
            self.log({"time/token": now.token.value})
            self.log({"time/token_in_epoch": now.token_in_epoch.value})

    def loss(self, loss: Tensor | None) -> None:
        """Logs the size of microbatches, and the mean loss of a batch; it waits for the device."""
        if self._loggers and loss is not None:
            size = self._theirs.device_train_microbatch_size
            self.log({"trainer/device_train_microbatch_size": size})
            numbers = {"loss/train/total": loss.item()}
            self._theirs.total_loss_dict = numbers
            self.log(numbers)


class ToEventloop(LoggerDestination):
    """Hands the numbers that Composer's algorithms and callbacks log to our loggers.

    Args:
        state: ours, which takes them.

    Attributes:
        is_heard: whether a fit is under way, in which numbers have a place.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.is_heard = False

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Logs what is a single number; our loggers take nothing else."""
        if not self.is_heard:
            return
        for name, value in metrics.items():
            is_number = isinstance(value, int | float)
            if is_number or (isinstance(value, Tensor) and value.numel() == 1):
                self._state.log(name, value)
