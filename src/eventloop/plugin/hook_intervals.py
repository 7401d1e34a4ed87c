"""The option `every`, with which an implementation runs at intervals, such as every 100 batches."""

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
    """Yields (message, fix) if a hook can't have the option `every`."""
    if every is not None and hook.kind != "event":
        yield (
            f"every={str(every)!r} is for events, but {hook.name} is {a(hook.kind)}",
            "compare the clock in the implementation: state.clock.crossed(Time(...))",
        )


def at_intervals(
    impl: Implementation, function: Callable[..., Any], state: State
) -> Callable[..., Any]:
    """Returns a function that runs only when its interval is due: once for each multiple crossed.

    Returns the function unchanged if the implementation has no `every`.
    """
    if impl.every is None:
        return function
    is_due = _due(impl, state)

    def when_due(*arguments: Any) -> Any:
        return function(*arguments) if is_due() else None

    def wrapper_when_due(*arguments: Any) -> Generator[None, Any, Any]:
        return (yield from function(*arguments)) if is_due() else (yield)

    return wrapper_when_due if impl.wrapper else when_due


def _due(impl: Implementation, state: State) -> Callable[[], bool]:
    """Returns a function that decides whether the current call of an implementation is due."""
    every = impl.every
    clock = state.clock
    assert every is not None
    last_batch = -1

    def is_due() -> bool:
        nonlocal last_batch
        due = clock.crossed(every) and clock.batch != last_batch
        last_batch = clock.batch if due else last_batch
        return due

    if impl.hook.declared_by and impl.hook.per == "any":
        # A plugin can call its hook several times in a batch; only the first call is due.
        return is_due
    if impl.hook.per == "microbatch":
        return lambda: clock.crossed(every) and not state.microbatch_idx
    return functools.partial(clock.crossed, every)
