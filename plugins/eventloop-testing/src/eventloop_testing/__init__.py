"""Helpers for tests of plugins; `eventloop_testing.plugin` provides them as pytest fixtures."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eventloop.checkpoint.part_differences import differences
    from eventloop_testing.case import (
        isolated_trainer,
        recorder,
        shuffled_batches,
        tiny_batches,
        tiny_task,
    )
    from eventloop_testing.contract import check_plugin
    from eventloop_testing.pretend import (
        MixedDevicesError,
        PretendError,
        RaceError,
        Wait,
        counted_waits,
        pretend_device,
    )
    from eventloop_testing.ranks import run_ranks
    from eventloop_testing.resuming import (
        Dies,
        KilledRuns,
        edited_checkpoint,
        fit_and_die,
        last_checkpoint,
    )

__all__ = [
    "Dies",
    "KilledRuns",
    "MixedDevicesError",
    "PretendError",
    "RaceError",
    "Wait",
    "check_plugin",
    "counted_waits",
    "differences",
    "edited_checkpoint",
    "fit_and_die",
    "isolated_trainer",
    "last_checkpoint",
    "pretend_device",
    "recorder",
    "run_ranks",
    "shuffled_batches",
    "tiny_batches",
    "tiny_task",
]

# pytest imports this package in every project where eventloop is installed; torch must wait.
_LAZY = dict.fromkeys(__all__, "eventloop_testing.case")
_LAZY["check_plugin"] = "eventloop_testing.contract"
_LAZY["differences"] = "eventloop.checkpoint.part_differences"
_LAZY["run_ranks"] = "eventloop_testing.ranks"
_LAZY |= dict.fromkeys(
    (
        "MixedDevicesError",
        "PretendError",
        "RaceError",
        "Wait",
        "counted_waits",
        "pretend_device",
    ),
    "eventloop_testing.pretend",
)
_LAZY |= dict.fromkeys(
    ("Dies", "KilledRuns", "edited_checkpoint", "fit_and_die", "last_checkpoint"),
    "eventloop_testing.resuming",
)


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'eventloop_testing' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
