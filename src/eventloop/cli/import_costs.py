"""Measures the import of plugins, each in its own fork."""

from __future__ import annotations

import builtins
import importlib
import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eventloop.plugin.load import imported

if TYPE_CHECKING:
    from eventloop.plugin.records import Found

_LONGEST_S = 120


@dataclass(frozen=True)
class ImportCost:
    """The cost of an import, without the modules that every fit imports.

    Args:
        seconds: wall-clock time; None if the import failed, or can't be measured.
        with_torch: whether the plugin's module, or a module that it imports, imports torch.
    """

    seconds: float | None = None
    with_torch: bool | None = None


def measure_imports(plugins: Iterable[Found]) -> dict[Found, ImportCost]:
    """Imports each plugin in a separate fork, in which only torch and eventloop are imported.

    Call it before plugins are imported: an import that was made already costs no time.

    Returns:
        The cost of each plugin; empty on systems without `os.fork`.
    """
    if not hasattr(os, "fork"):
        return {}
    importlib.import_module("eventloop.trainer")
    return {plugin: _in_a_fork(plugin) for plugin in plugins}


def _in_a_fork(plugin: Found) -> ImportCost:
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking a process with threads
        child = os.fork()
    if not child:
        try:
            silent = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(silent, descriptor)
            sys.stdout = sys.stderr = os.fdopen(silent, "w")  # they may be replaced, as by pytest
            os.write(writing, json.dumps(_cost(plugin)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    is_done, _, _ = select.select([reading], [], [], _LONGEST_S)
    text = os.read(reading, 4096) if is_done else b""
    os.close(reading)
    os.kill(child, signal.SIGKILL)  # threads of a plugin might keep it alive
    os.waitpid(child, 0)
    return ImportCost(*json.loads(text)) if text else ImportCost()


def _cost(plugin: Found) -> tuple[float, bool]:
    packages: set[str] = set()
    original_import = builtins.__import__

    def recording_import(name: str, *args: Any, **kwargs: Any) -> Any:
        packages.add(name.partition(".")[0])
        return original_import(name, *args, **kwargs)

    builtins.__import__ = recording_import
    start = time.perf_counter()
    imported(plugin)
    return time.perf_counter() - start, "torch" in packages
