"""Raises errors of the pretend device: immediately, or at the end of a backward pass.

An error that a Python operator raises during a backward pass is lost in the autograd engine, or aborts
the process (torch 2.13). So it is raised at the end of the pass, which can continue until then: the
memory exists on the host, and a race has no effect there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eventloop_testing.pretend import private

_waiting: list[Exception] = []


def fail(error: Exception) -> None:
    """Raises an error, or keeps the first error of a backward pass until its end."""
    if not private.is_in_backward():
        raise error
    _waiting.append(error)


def raising_at_end(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps torch's backward pass to raise its first error at its end."""

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
