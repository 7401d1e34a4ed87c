"""Parts of messages: the closest of several names, and the fix as the caller would write it.

Works without torch. What to do reads differently in a shell: join it with `+`, since an f-string
keeps Python's words alone.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from eventloop.errors import closest, counted
from eventloop.fixes import as_option, as_set, switch_off
from eventloop.safe_text import one_line
from eventloop.signals import status_of

if TYPE_CHECKING:
    from eventloop.state import State

__all__ = [
    "announce_off",
    "as_option",
    "as_set",
    "closest",
    "counted",
    "one_line",
    "status_of",
    "switch_off",
]


def announce_off(state: State, way_in: str) -> None:
    """Writes a line that names the installed algorithms that autoload="callbacks" keeps off.

    Args:
        way_in: where one is passed to take part, `algorithms=[...]`.
    """
    names = sorted(one["name"] for one in state.manifest["off"] if one["kind"] == "autoload")
    if names and state.rank == 0 and state.settings.autoload == "callbacks":
        sys.stderr.write(f"eventloop: off, unless passed in {way_in}: {', '.join(names)}\n")
