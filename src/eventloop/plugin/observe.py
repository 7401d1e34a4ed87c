"""Observers: what is put around implementations before they are frozen, in runs that are watched.

A run without observers pays nothing for the possibility: neither plans nor loop know of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from eventloop.state import State

if TYPE_CHECKING:
    from eventloop.plugin.order import Implementation

Enter = Callable[[Any], AbstractContextManager[object]]
Given = Callable[[State], Any]


class Observer(Protocol):
    """Looks on while implementations run; results stay what they are."""

    def observed(self, one: Implementation) -> Implementation:
        """Returns the implementation as it is to be called.

        It may be asked again for the same one: plans are frozen anew when a plugin drops out.
        """
        ...


def observe(
    implementations: Iterable[Implementation], observers: Sequence[Observer]
) -> tuple[Implementation, ...]:
    """Puts the observers around implementations, the first innermost."""
    observed = list(implementations)
    for observer in observers:
        observed = [observer.observed(one) for one in observed]
    return tuple(observed)


def caller(one: Implementation) -> Callable[..., Any]:
    """Returns the function as it takes everything that its hook passes, `state` first."""
    function, names = one.function, one.hook.argnames
    if one.argnames == names:
        return function
    idxs = [names.index(name) for name in one.argnames]
    return lambda *args: function(*(args[idx] for idx in idxs))


def instead(one: Implementation, function: Callable[..., Any]) -> Implementation:
    """Returns the implementation with another function, which still tells where it was written.

    Args:
        function: takes everything that the hook passes; a generator function for a wrapper.
    """
    known = functools.wraps(one.function)(function)
    return replace(one, function=known, argnames=one.hook.argnames)


def watched(
    one: Implementation, enter: Enter, *, in_halves: bool = False, given: Given | None = None
) -> Implementation:
    """Returns the implementation with a context entered around each of its calls.

    Args:
        enter: gives the context for the State, or the view of it, that the hook passes.
        in_halves: whether a wrapper's context is left at its `yield` and entered anew behind it,
            so that what the wrapper encloses isn't inside.
        given: what is handed on in the State's place.
    """
    call = caller(one)

    def plain(state: State, *rest: Any) -> Any:
        with enter(state):
            return call(state if given is None else given(state), *rest)

    def around(state: State, *rest: Any) -> Generator[Any, Any, Any]:
        generator = call(state if given is None else given(state), *rest)
        half = functools.partial(enter, state) if in_halves else nullcontext
        # `yield from` would close the wrapper where a GeneratorExit is to be thrown into it.
        with nullcontext() if in_halves else enter(state):
            try:
                with half():
                    value = next(generator)
                while True:
                    try:
                        sent = yield value
                    except BaseException as error:  # noqa: BLE001  it goes on to the wrapper
                        with half():
                            value = generator.throw(error)
                    else:
                        with half():
                            value = generator.send(sent)
            except StopIteration as stop:
                return stop.value

    return instead(one, around if one.wrapper else plain)
