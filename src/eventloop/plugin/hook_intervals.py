"""The option `every` of an implementation: it runs at intervals, such as every 100 batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

from eventloop.errors import a

if TYPE_CHECKING:
    from eventloop.clock import Time
    from eventloop.hook_markers import Hook
    from eventloop.plugin.order import Implementation
    from eventloop.state import State


def interval_misfits(hook: Hook, every: Time | None) -> Iterator[tuple[str, str]]:
    """Yields why a hook can't have the option `every`, and what to do."""
    if every is not None and hook.kind != "event":
        yield (
            f"every={str(every)!r} is for events, but {hook.name} is {a(hook.kind)}",
            "compare the clock in the implementation: state.clock.crossed(Time(...))",
        )


def at_intervals(
    one: Implementation, function: Callable[..., Any], state: State
) -> Callable[..., Any]:
    """Returns the function with its option `every` applied: runs once for each multiple crossed."""
    if one.every is None:
        return function
    is_due = _due(one, state)

    def now_and_then(*rest: Any) -> Any:
        return function(*rest) if is_due() else None

    def around(*rest: Any) -> Generator[None, Any, Any]:
        return (yield from function(*rest)) if is_due() else (yield)

    return around if one.wrapper else now_and_then


def _due(one: Implementation, state: State) -> Callable[[], bool]:
    """Returns whether the current call of an implementation is due by its option `every`."""
    every = one.every
    clock = state.clock
    assert every is not None
    last_batch = -1

    def is_due() -> bool:
        nonlocal last_batch
        due = clock.crossed(every) and clock.batch != last_batch
        last_batch = clock.batch if due else last_batch
        return due

    if one.hook.declared_by and one.hook.per == "any":
        return is_due  # a plugin can call its hook several times in a batch
    if one.hook.per == "microbatch":
        return lambda: clock.crossed(every) and not state.microbatch_idx
    return functools.partial(clock.crossed, every)
