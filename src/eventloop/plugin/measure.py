"""The cost of a plugin's import, measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eventloop.plugin.records import Found

_LONGEST_S = 120
_PROGRAM = """
import json, sys, time
path, name, file = json.loads(sys.argv[1])
sys.path[:] = path
import importlib, importlib.util
import eventloop
start = time.perf_counter()
if file:
    spec = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
else:
    importlib.import_module(name)
seconds = time.perf_counter() - start
print(json.dumps([seconds, "torch" in sys.modules]), file=sys.__stderr__)
"""


@dataclass(frozen=True)
class Measured:
    """What an import costs.

    Args:
        seconds: wall-clock time; None where it failed.
        with_torch: whether torch came with it; its time is included.
    """

    seconds: float | None = None
    with_torch: bool | None = None


def measure_import(found: Found) -> Measured:
    """Imports a plugin's module in a fresh interpreter, in which only `eventloop` was imported."""
    name = f"plugin_{found.path.stem}" if found.path else found.entry_point.module
    given = json.dumps([sys.path, name, str(found.path or "")])
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, given],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LONGEST_S,
            check=True,
        )
        seconds, with_torch = json.loads(done.stderr.splitlines()[-1])
    except (subprocess.SubprocessError, OSError, ValueError, IndexError):
        return Measured()
    return Measured(seconds, with_torch)


def measure_imports(found: Iterable[Found]) -> list[Measured]:
    """Measures several, a few side by side."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        return list(pool.map(measure_import, found))
