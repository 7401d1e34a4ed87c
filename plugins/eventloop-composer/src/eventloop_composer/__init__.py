"""Composer for eventloop: algorithms, callbacks, loggers and models written for it run unchanged."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from eventloop_composer.plugin import Composer

if TYPE_CHECKING:
    from eventloop_composer.building import task
    from eventloop_composer.trainer import Trainer

__all__ = ["Composer", "Trainer", "task"]

# Importing Composer takes seconds, so the modules that need it are imported on first use.
_FROM = {"Trainer": "trainer", "task": "building"}


def __getattr__(name: str) -> object:
    if name not in _FROM:
        raise AttributeError(f"module 'eventloop_composer' has no attribute {name!r}")
    return getattr(importlib.import_module(f"eventloop_composer.{_FROM[name]}"), name)
