"""Records where the host waited for the pretend device, by plugin and line."""

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
    """A wait of the host for the device.

    Args:
        how: the call that waited: "item", "cpu", "Event.synchronize".
        plugin: package of the innermost running plugin, or else of the line.
        where: file and line, the innermost outside torch.
    """

    how: str
    plugin: str
    where: str


_watching: list[list[Wait]] = []


@contextmanager
def counted_waits() -> Iterator[list[Wait]]:
    """Yields a list that collects each wait of the host inside its context."""
    waits: list[Wait] = []
    _watching.append(waits)
    try:
        yield waits
    finally:
        # By identity: two lists with the same waits are equal.
        _watching[:] = [watched for watched in _watching if watched is not waits]


def waited(how: str) -> None:
    """Records a wait of the host."""
    if _watching:
        plugin, line = _caller()
        for waits in _watching:
            waits.append(Wait(how, plugin, line))


def _caller() -> tuple[str, str]:
    """Returns the package that waits, and the line."""
    innermost_line = ""
    package = ""
    for frame, line in traceback.walk_stack(None):
        file = frame.f_code.co_filename
        if file.startswith(_INSIDE) or Path(file).name == "contextlib.py":
            continue
        module = str(frame.f_globals.get("__name__", ""))
        if not innermost_line:
            innermost_line = f"{file}:{line}"
            package = module.partition(".")[0]
        if module.startswith("eventloop_") and not module.startswith(
            ("eventloop_testing", "eventloop_check")
        ):
            return module.partition(".")[0], innermost_line
        if module == _LOOP:
            break
    return package, innermost_line
