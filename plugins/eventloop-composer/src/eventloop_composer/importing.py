"""Imports Composer, which its plugin does only when something of it is named."""

from __future__ import annotations

import importlib
import importlib.util
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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
    declare_operators()
    try:
        with _restored_handlers():
            importlib.import_module("composer")
    except ImportError as error:
        raise PluginError(
            f"Composer can't be imported: {error}",
            fix="install it as the README of eventloop-composer says: it pins an older torch, so "
            "that its requirements are left out",
        ) from error


def declare_operators() -> None:
    """Declares torchvision's operators where its wheel is for CUDA and torch isn't; imports nothing.

    Whatever imports torchvision fails otherwise, torchmetrics among it, whether Composer is wanted or not.
    """
    if _declared or torch.version.cuda is not None or "torchvision" in sys.modules:
        return
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return
    version = Path(found.origin).with_name("version.py")
    if not version.is_file() or not re.search(r"\+cu\d", version.read_text()):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema in _OPERATORS.values():
        with suppress(RuntimeError):  # another package has declared it already
            library.define(schema)  # type: ignore[no-untyped-call]
    _declared.append(library)


@contextmanager
def _restored_handlers() -> Iterator[None]:
    """Puts handlers back: Composer's engine takes SIGINT and SIGTERM when it is imported."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    saved = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for one, handler in saved.items():
            if handler is not None:  # not set from Python
                signal.signal(one, handler)
