"""Raises what goes wrong on the pretend device, at once or when a backward pass is over.

An error that an operator of Python raises amid a backward pass is lost on its way through the engine,
or aborts the process (torch 2.13). So it is raised at the end of the pass, which goes on: memory is there
in truth, and a race has no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eventloop_testing.pretend import private

_waiting: list[Exception] = []


def fail(error: Exception) -> None:
    """Raises an error, or keeps the first one of a backward pass for its end."""
    if not private.is_in_backward():
        raise error
    _waiting.append(error)


def raising_at_end(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps torch's backward pass; what went wrong in it is raised at its end."""

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            result = run_backward(*args, **kwargs)
            if _waiting and not private.is_in_backward():
                raise _waiting[0]
            return result
        finally:
            if not private.is_in_backward():
                _waiting.clear()

    return run
