"""Imports Composer, which the plugin does only if an option names an object of it."""

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

# Operators that torchvision's Python code expects from its compiled library, which a CUDA wheel can't
# load with a torch built for the CPU (torchvision 0.28).
_OPERATORS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_declared: list[torch.library.Library] = []  # an operator lives as long as its library


def import_composer() -> None:
    """Imports Composer, if necessary; the process keeps its signal handlers.

    Raises:
        PluginError: Composer can't be imported.
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
    """Declares torchvision's operators if its wheel is for CUDA and torch isn't; imports nothing.

    Otherwise every import of torchvision fails, also in torchmetrics, even without Composer.
    """
    if _declared or torch.version.cuda is not None or "torchvision" in sys.modules:
        return
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    version = Path(spec.origin).with_name("version.py")
    if not version.is_file() or not re.search(r"\+cu\d", version.read_text()):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema in _OPERATORS.values():
        with suppress(RuntimeError):  # another package has declared it already
            library.define(schema)  # type: ignore[no-untyped-call]
    _declared.append(library)


@contextmanager
def _restored_handlers() -> Iterator[None]:
    """Restores signal handlers: Composer's engine takes SIGINT and SIGTERM when it is imported."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    saved = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in saved.items():
            if handler is not None:  # not set from Python
                signal.signal(number, handler)
