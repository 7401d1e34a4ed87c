"""Where the host waited for the pretend device, by plugin and line."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

_INSIDE = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parent}{os.sep}", "<")
_LOOP = "eventloop.loop"


class Wait(NamedTuple):
    """One time that the host waited.

    Args:
        how: what waited: "item", "cpu", "Event.synchronize".
        plugin: the package of the innermost plugin whose code is under way, else of the line.
        where: file and line, the innermost that isn't torch's.
    """

    how: str
    plugin: str
    where: str


_watching: list[list[Wait]] = []


@contextmanager
def counted_waits() -> Iterator[list[Wait]]:
    """Yields a list to which each wait of the host inside its `with` is added."""
    seen: list[Wait] = []
    _watching.append(seen)
    try:
        yield seen
    finally:
        _watching[:] = [one for one in _watching if one is not seen]


def waited(how: str) -> None:
    """Notes that the host waits."""
    if _watching:
        plugin, where = _caller()
        for seen in _watching:
            seen.append(Wait(how, plugin, where))


def _caller() -> tuple[str, str]:
    """Returns the package that waits, and the line."""
    where = package = ""
    for frame, line in traceback.walk_stack(None):
        file = frame.f_code.co_filename
        if file.startswith(_INSIDE) or Path(file).name == "contextlib.py":
            continue
        module = str(frame.f_globals.get("__name__", ""))
        if not where:
            where = f"{file}:{line}"
            package = module.partition(".")[0]
        if module.startswith("eventloop_") and not module.startswith(
            ("eventloop_testing", "eventloop_check")
        ):
            return module.partition(".")[0], where
        if module == _LOOP:
            break
    return package, where
