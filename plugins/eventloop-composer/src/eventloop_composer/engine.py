"""Composer's engine, and which of its events anything listens to."""

from __future__ import annotations

import os
from collections.abc import Sequence

from composer.core import Algorithm, Callback, Engine, Event


class QuietEngine(Engine):
    """Composer's engine, without the text of a log line at each event that it makes and drops.

    Such a line takes longer than calling an event that nothing listens to.
    """

    def _debug_log(self, event: Event, msg: str) -> None:
        # Private, of mosaicml 0.32.1: `ENGINE_DEBUG` is asked before the text is made, not after.
        if os.environ.get("ENGINE_DEBUG"):
            super()._debug_log(event, msg)


def listens(event: Event, algorithms: Sequence[Algorithm], callbacks: Sequence[Callback]) -> bool:
    """Whether an algorithm or a callback could do something at an event.

    An algorithm says so at the event itself. A callback does where it has a method of the event's
    name, or takes all events.
    """
    return bool(algorithms) or any(
        _is_own(callback, name) for callback in callbacks for name in (event.value, "run_event")
    )


def _is_own(callback: Callback, name: str) -> bool:
    in_class = getattr(type(callback), name, None) is not getattr(Callback, name, None)
    return in_class or name in vars(callback)
