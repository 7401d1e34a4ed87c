"""eventloop: a PyTorch training loop made of hooks; install a plugin and it takes part."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from eventloop.clock import Clock, Moment, Time
from eventloop.errors import (
    CheckpointError,
    EventloopError,
    NonFiniteError,
    PluginError,
    ReadOnlyStateError,
    ResumeError,
    RunFolderError,
    SettingError,
    TaskError,
    UsageError,
)
from eventloop.events import Event
from eventloop.hooks import hookimpl, hookspec

if TYPE_CHECKING:
    import eventloop.schedules as schedules
    from eventloop.config.settings import Settings
    from eventloop.data.batches import Count
    from eventloop.diagnostics.check import Check
    from eventloop.diagnostics.trace import Trace
    from eventloop.distributed.join import rank_zero_first
    from eventloop.run.result import Result
    from eventloop.run.start import Allowed
    from eventloop.short_form import fit
    from eventloop.signals import is_interruption
    from eventloop.state import State
    from eventloop.task import Task
    from eventloop.trainer import Trainer, TrainerBuilder
    from eventloop.training.grad_scaling import StepOutcome
    from eventloop.urls import Url
    from eventloop.view import StateView

__version__ = "0.1.0"
__all__ = [
    "Allowed",
    "Check",
    "CheckpointError",
    "Clock",
    "Count",
    "Event",
    "EventloopError",
    "Moment",
    "NonFiniteError",
    "PluginError",
    "ReadOnlyStateError",
    "Result",
    "ResumeError",
    "RunFolderError",
    "SettingError",
    "Settings",
    "State",
    "StateView",
    "StepOutcome",
    "Task",
    "TaskError",
    "Time",
    "Trace",
    "Trainer",
    "TrainerBuilder",
    "Url",
    "UsageError",
    "fit",
    "hookimpl",
    "hookspec",
    "is_interruption",
    "rank_zero_first",
    "schedules",
]

# What needs torch is imported when it is first asked for, so that `import eventloop` stays fast.
_LAZY = {
    "Allowed": "eventloop.run.start",
    "Check": "eventloop.diagnostics.check",
    "Count": "eventloop.data.batches",
    "Result": "eventloop.run.result",
    "Settings": "eventloop.config.settings",
    "State": "eventloop.state",
    "StateView": "eventloop.view",
    "StepOutcome": "eventloop.training.grad_scaling",
    "Task": "eventloop.task",
    "Trace": "eventloop.diagnostics.trace",
    "Trainer": "eventloop.trainer",
    "TrainerBuilder": "eventloop.trainer",
    "fit": "eventloop.short_form",
    "Url": "eventloop.urls",
    "is_interruption": "eventloop.signals",
    "rank_zero_first": "eventloop.distributed.join",
}


def __getattr__(name: str) -> object:
    if name == "schedules":
        return importlib.import_module("eventloop.schedules")
    if name not in _LAZY:
        raise AttributeError(f"module 'eventloop' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
