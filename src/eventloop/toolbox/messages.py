"""Parts of messages: the closest of several names, and the fix as the caller would write it.

Works without torch. What to do reads differently in a shell: join it with `+`, since an f-string
keeps Python's words alone.
"""

from __future__ import annotations

from eventloop.errors import closest, counted
from eventloop.signals import status_of
from eventloop.text import as_option, as_set, one_line, switch_off

__all__ = ["as_option", "as_set", "closest", "counted", "one_line", "status_of", "switch_off"]
