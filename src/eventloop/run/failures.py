"""Failures: the first is reported, and those that come on the way out are kept with it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from eventloop.plugin.plans import Plans, told

if TYPE_CHECKING:
    from eventloop.state import State


def close_all(hooks: Plans, state: State) -> None:
    """Tells every plugin to close; raises the first failure with the others noted on it."""
    failures = told(hooks.close, state)
    if failures:
        first, *others = failures
        for other in others:
            keep(first, other)
        raise first


def keep(error: BaseException, other: BaseException) -> None:
    """Notes on an exception that another was raised while it was dealt with, and where."""
    details = "".join(traceback.format_exception(other, chain=False))
    error.add_note(f"then also: {type(other).__name__}: {other}\n{details}".rstrip())


def failures_of(function: Callable[[], None]) -> list[BaseException]:
    """Calls a function; gives what it raised, if it did."""
    try:
        function()
    except BaseException as error:  # noqa: BLE001  the caller raises what came first
        return [error]
    return []
