"""Observers: wrap implementations before they are frozen, for runs that are watched.

A run without observers has no cost, because plans and loop don't know about them. The core has one
observer, `DisableFailing`: with `on_callback_error="disable"` it skips a callback that has raised.
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

    def observed(self, implementation: Implementation) -> Implementation:
        """Returns the implementation to call.

        Called again for the same implementation when plans are frozen again, after a plugin has
        dropped out.
        """
        ...


def observe(
    implementations: Iterable[Implementation], observers: Sequence[Observer]
) -> tuple[Implementation, ...]:
    """Wraps implementations in observers, the first innermost."""
    observed = list(implementations)
    for observer in observers:
        observed = [observer.observed(impl) for impl in observed]
    return tuple(observed)


@dataclass(frozen=True)
class Around:
    """Runs each call of every implementation in a plugin's context manager.

    Args:
        enter: the plugin's `around_calls`, called with the names of plugin and hook, and the State.
    """

    enter: Callable[[str, str, Any], AbstractContextManager[object]]

    def observed(self, implementation: Implementation) -> Implementation:
        """Returns the implementation inside the context manager."""
        return with_context(
            implementation,
            partial(self.enter, implementation.plugin.name, implementation.hook.name),
        )


def instead(implementation: Implementation, function: Callable[..., Any]) -> Implementation:
    """Returns the implementation with its function replaced, keeping the source location.

    Args:
        function: takes all arguments of the hook; a generator function for a wrapper.
    """
    wrapped = functools.wraps(implementation.function)(function)
    return replace(implementation, function=wrapped, argnames=implementation.hook.argnames)


def with_context(
    implementation: Implementation,
    enter: Enter,
    *,
    in_halves: bool = False,
    given: Given | None = None,
) -> Implementation:
    """Returns the implementation with a context manager around each of its calls.

    Args:
        enter: returns the context manager for the State, or the view of it, that the hook passes.
        in_halves: whether a wrapper leaves the context at its `yield` and enters a new one after it,
            so that the enclosed call runs outside of both.
        given: returns the argument to pass to the implementation instead of the State.
    """
    call = caller(implementation)

    def plain(state: State, *arguments: Any) -> Any:
        with enter(state):
            return call(state if given is None else given(state), *arguments)

    def around(state: State, *arguments: Any) -> Generator[Any, Any, Any]:
        generator = call(state if given is None else given(state), *arguments)
        half = functools.partial(enter, state) if in_halves else nullcontext
        # `yield from` isn't used: it would close the wrapper instead of throwing a GeneratorExit
        # into it.
        with nullcontext() if in_halves else enter(state):
            try:
                with half():
                    value = next(generator)
                while True:
                    try:
                        sent = yield value
                    except BaseException as error:  # noqa: BLE001  thrown into the wrapper
                        with half():
                            value = generator.throw(error)
                    else:
                        with half():
                            value = generator.send(sent)
            except StopIteration as stop:
                return stop.value

    return instead(implementation, around if implementation.wrapper else plain)


def observers_of(settings: Settings) -> tuple[Observer, ...]:
    """Returns the observers that a run's settings enable."""
    return (DisableFailing(),) if settings.on_callback_error == "disable" else ()


class DisableFailing:
    """Skips a callback in all hooks except `close` after its first exception.

    A SystemExit counts as an exception; a KeyboardInterrupt ends the run.
    """

    def __init__(self) -> None:
        self._off: set[str] = set()

    def observed(self, implementation: Implementation) -> Implementation:
        """Returns a callback's implementation in a form that never raises; others unchanged."""
        if implementation.plugin.role != "callback":
            return implementation
        return instead(
            implementation,
            self._around(implementation) if implementation.wrapper else self._plain(implementation),
        )

    def _plain(self, impl: Implementation) -> Callable[..., Any]:
        call = caller(impl)

        def plain(state: Any, *arguments: Any) -> Any:
            if impl.plugin.name in self._off and impl.hook.name != "close":
                return None
            try:
                return call(state, *arguments)
            except (Exception, SystemExit) as error:  # noqa: BLE001  the warning names it
                self._switch_off(impl, state, error)
                return None

        return plain

    def _around(self, impl: Implementation) -> Callable[..., Any]:
        call = caller(impl)

        def around(state: Any, *arguments: Any) -> Generator[Any, Any, Any]:
            if impl.plugin.name in self._off:
                return (yield)
            generator = call(state, *arguments)
            try:
                next(generator)
            except (Exception, SystemExit) as error:  # noqa: BLE001
                self._switch_off(impl, state, error)
                return (yield)
            try:
                result = yield
            except BaseException as passing:
                self._end(impl, state, passing, partial(generator.throw, passing))
                raise
            ended, value = self._end(impl, state, None, partial(generator.send, result))
            return value if ended else result

        return around

    def _end(
        self,
        impl: Implementation,
        state: Any,
        outer_error: BaseException | None,
        resume: Callable[[], Any],
    ) -> tuple[bool, Any]:
        """Runs a wrapper's second half; returns whether it succeeded, and its result.

        Args:
            outer_error: the exception of the enclosed call, which the wrapper must not swallow.
            resume: resumes the wrapper.
        """
        try:
            resume()
        except StopIteration as stop:
            if outer_error is None:
                return True, stop.value
            self._switch_off(impl, state, PluginError("a callback swallowed an exception"))
        except (Exception, SystemExit) as error:  # noqa: BLE001
            if error is not outer_error:
                self._switch_off(impl, state, error)
        except BaseException as error:
            if error is not outer_error:
                raise
        else:
            self._switch_off(impl, state, PluginError("a wrapper yielded a second time"))
        return False, None

    def _switch_off(self, impl: Implementation, state: Any, error: BaseException) -> None:
        switched_off = "is switched off for the rest of this run because it raised"
        if impl.plugin.name in self._off:
            switched_off = "is off, and raised again:"
        self._off.add(impl.plugin.name)
        frames = traceback.extract_tb(error.__traceback__)
        location = f"{frames[-1].filename}:{frames[-1].lineno}" if len(frames) > 1 else impl.where
        warnings.warn(
            f"{impl.plugin.origin} {switched_off} {type(error).__name__} in {impl.hook.name}, "
            f"{moment_in(impl.hook.name, state)}, rank {state.layout.label(state.rank)}: "
            + text_of(error)
            + f"\n  at   {location}\n  fix  fix it, or "
            + impl.plugin.way_out,
            stacklevel=2,
        )
