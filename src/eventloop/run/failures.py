"""Failures: the first is reported, and those that come on the way out are kept with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eventloop.errors import keep
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
