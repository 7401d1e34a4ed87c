"""Imports Composer, which its plugin does only when something of it is named."""

from __future__ import annotations

import importlib
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from eventloop import PluginError

# What torchvision's Python code expects of its compiled half, which a wheel built for CUDA can't
# load beside a torch built for the CPU (torchvision 0.28).
_OPERATORS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_declared: list[torch.library.Library] = []  # an operator lives as long as its library


def import_composer() -> None:
    """Imports Composer, if it isn't yet; the process's signal handlers stay what they are.

    Raises:
        PluginError: it can't be imported.
    """
    if "composer" in sys.modules:
        return
    try:
        with _kept_handlers():
            import_torchvision()
            importlib.import_module("composer")
    except ImportError as error:
        raise PluginError(
            f"Composer can't be imported: {error}",
            fix="install it as the README of eventloop-composer says: it pins an older torch, so "
            "that its requirements are left out",
        ) from error


def import_torchvision() -> None:
    """Imports torchvision, with its operators declared where a wheel for CUDA lacks them."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in [one for one in sys.modules if one.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for schema in _OPERATORS.values():
            library.define(schema)  # type: ignore[no-untyped-call]
        _declared.append(library)
        importlib.import_module("torchvision")


@contextmanager
def _kept_handlers() -> Iterator[None]:
    """Puts handlers back: Composer's engine takes SIGINT and SIGTERM when it is imported."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for one, handler in kept.items():
            if handler is not None:  # not set from Python
                signal.signal(one, handler)
