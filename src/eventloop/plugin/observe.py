"""Observers: wrap implementations before they are frozen, in runs that are watched.

A run without observers has no cost, as plans and loop don't know about them. The core has one: with
`on_callback_error="disable"` it skips a callback that has raised.
"""

from __future__ import annotations

import functools
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from eventloop.errors import PluginError, text_of
from eventloop.plugin.calling import caller
from eventloop.plugin.hook_errors import moment_in
from eventloop.state import State

if TYPE_CHECKING:
    from eventloop.config.settings import Settings
    from eventloop.plugin.order import Implementation

Enter = Callable[[Any], AbstractContextManager[object]]
Given = Callable[[State], Any]


class Observer(Protocol):
    """Watches implementations while they run, without changing results."""

    def observed(self, one: Implementation) -> Implementation:
        """Returns the implementation to call.

        Can be called again for the same one, as plans are frozen again when a plugin drops out.
        """
        ...


def observe(
    implementations: Iterable[Implementation], observers: Sequence[Observer]
) -> tuple[Implementation, ...]:
    """Wraps implementations in observers, the first innermost."""
    observed = list(implementations)
    for observer in observers:
        observed = [observer.observed(one) for one in observed]
    return tuple(observed)


@dataclass(frozen=True)
class Around:
    """Runs each call of every implementation in a plugin's context manager.

    Args:
        enter: its `around_calls`, called with the names of plugin and hook, and the State.
    """

    enter: Callable[[str, str, Any], AbstractContextManager[object]]

    def observed(self, one: Implementation) -> Implementation:
        """Returns the implementation with the context manager around it."""
        return with_context(one, partial(self.enter, one.plugin.name, one.hook.name))


def instead(one: Implementation, function: Callable[..., Any]) -> Implementation:
    """Returns the implementation with another function, keeping its source location.

    Args:
        function: takes all arguments of the hook; a generator function for a wrapper.
    """
    known = functools.wraps(one.function)(function)
    return replace(one, function=known, argnames=one.hook.argnames)


def with_context(
    one: Implementation, enter: Enter, *, in_halves: bool = False, given: Given | None = None
) -> Implementation:
    """Returns the implementation with a context manager around each of its calls.

    Args:
        enter: returns the context manager for the State, or the view of it, that the hook passes.
        in_halves: whether to leave a wrapper's context at its `yield` and enter another one after
            it, so that the enclosed call isn't inside.
        given: passed instead of the State.
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
                    except BaseException as error:  # noqa: BLE001  it is passed on to the wrapper
                        with half():
                            value = generator.throw(error)
                    else:
                        with half():
                            value = generator.send(sent)
            except StopIteration as stop:
                return stop.value

    return instead(one, around if one.wrapper else plain)


def observers_of(settings: Settings) -> tuple[Observer, ...]:
    """Returns the observers that a run's settings enable."""
    return (DisableFailing(),) if settings.on_callback_error == "disable" else ()


class DisableFailing:
    """Skips a callback in all hooks except `close` after its first exception.

    SystemExit counts as one; KeyboardInterrupt ends the run.
    """

    def __init__(self) -> None:
        self._off: set[str] = set()

    def observed(self, one: Implementation) -> Implementation:
        """Returns a callback's implementation as one that never raises; others unchanged."""
        if one.plugin.role != "callback":
            return one
        return instead(one, self._around(one) if one.wrapper else self._plain(one))

    def _plain(self, one: Implementation) -> Callable[..., Any]:
        call = caller(one)

        def plain(state: Any, *rest: Any) -> Any:
            if one.plugin.name in self._off and one.hook.name != "close":
                return None
            try:
                return call(state, *rest)
            except (Exception, SystemExit) as error:  # noqa: BLE001  the warning names it
                self._switch_off(one, state, error)
                return None

        return plain

    def _around(self, one: Implementation) -> Callable[..., Any]:
        call = caller(one)

        def around(state: Any, *rest: Any) -> Generator[Any, Any, Any]:
            if one.plugin.name in self._off:
                return (yield)
            generator = call(state, *rest)
            try:
                next(generator)
            except (Exception, SystemExit) as error:  # noqa: BLE001
                self._switch_off(one, state, error)
                return (yield)
            try:
                result = yield
            except BaseException as passing:
                self._end(one, state, passing, partial(generator.throw, passing))
                raise
            ended, value = self._end(one, state, None, partial(generator.send, result))
            return value if ended else result

        return around

    def _end(
        self,
        one: Implementation,
        state: Any,
        passing: BaseException | None,
        resume: Callable[[], Any],
    ) -> tuple[bool, Any]:
        """Runs a wrapper's second half; returns whether it succeeded, and its result.

        Args:
            passing: the exception of the enclosed call, which it must not swallow.
        """
        try:
            resume()
        except StopIteration as stop:
            if passing is None:
                return True, stop.value
            self._switch_off(one, state, PluginError("a callback swallowed an exception"))
        except (Exception, SystemExit) as error:  # noqa: BLE001
            if error is not passing:
                self._switch_off(one, state, error)
        except BaseException as error:
            if error is not passing:
                raise
        else:
            self._switch_off(one, state, PluginError("a wrapper yielded a second time"))
        return False, None

    def _switch_off(self, one: Implementation, state: Any, error: BaseException) -> None:
        switched_off = "is switched off for the rest of this run, for it raised"
        if one.plugin.name in self._off:
            switched_off = "is off, and raised again:"
        self._off.add(one.plugin.name)
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if len(frames) > 1 else one.where
        warnings.warn(
            f"{one.plugin.origin} {switched_off} {type(error).__name__} in {one.hook.name}, "
            f"{moment_in(one.hook.name, state)}, rank {state.layout.label(state.rank)}: "
            + text_of(error)
            + f"\n  at   {where}\n  fix  fix it, or "
            + one.plugin.way_out,
            stacklevel=2,
        )
