"""What tests of plugins need; `eventloop.testing.plugin` has it as pytest fixtures."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eventloop.checkpoint.diff import differences
    from eventloop.testing.case import (
        isolated_trainer,
        recorder,
        shuffled_batches,
        tiny_batches,
        tiny_task,
    )
    from eventloop.testing.contract import check_plugin
    from eventloop.testing.ranks import run_ranks
    from eventloop.testing.resuming import (
        Dies,
        KilledRuns,
        edited_checkpoint,
        fit_and_die,
        last_checkpoint,
    )
    from eventloop.testing.storages import check_storage

__all__ = [
    "Dies",
    "KilledRuns",
    "check_plugin",
    "check_storage",
    "differences",
    "edited_checkpoint",
    "fit_and_die",
    "isolated_trainer",
    "last_checkpoint",
    "recorder",
    "run_ranks",
    "shuffled_batches",
    "tiny_batches",
    "tiny_task",
]

# pytest imports this package in every project where eventloop is installed; torch must wait.
_LAZY = dict.fromkeys(__all__, "eventloop.testing.case")
_LAZY["check_plugin"] = "eventloop.testing.contract"
_LAZY["check_storage"] = "eventloop.testing.storages"
_LAZY["differences"] = "eventloop.checkpoint.diff"
_LAZY["run_ranks"] = "eventloop.testing.ranks"
_LAZY |= dict.fromkeys(
    ("Dies", "KilledRuns", "edited_checkpoint", "fit_and_die", "last_checkpoint"),
    "eventloop.testing.resuming",
)


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'eventloop.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
