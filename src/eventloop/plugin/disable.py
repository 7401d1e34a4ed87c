"""`on_callback_error="disable"`: a callback that raises is left out, and the run goes on.

It is an observer, so that a run that raises instead pays nothing for it.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any

from eventloop.errors import PluginError
from eventloop.plugin.observe import Observer, caller, instead

if TYPE_CHECKING:
    from eventloop.config.settings import Settings
    from eventloop.plugin.order import Implementation


def observers_of(settings: Settings) -> tuple[Observer, ...]:
    """Returns the observers that a run's settings ask for."""
    return (DisableFailing(),) if settings.on_callback_error == "disable" else ()


class DisableFailing:
    """Leaves a callback out of all hooks but `close` from its first exception on.

    `sys.exit` counts as one; KeyboardInterrupt, which is a person's, ends the run.
    """

    def __init__(self) -> None:
        self._off: set[str] = set()

    def observed(self, one: Implementation) -> Implementation:
        """Returns a callback's implementation as one that never raises; others as they are."""
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
            except (Exception, SystemExit) as error:  # noqa: BLE001  the warning tells of it
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
        """Runs a wrapper's second half; tells whether it ended well, and gives what it returned.

        Args:
            passing: the exception of what the wrapper encloses, which it must let pass.
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
            f"{one.plugin.origin} {switched_off} {type(error).__name__} in {one.hook.name}, epoch {state.clock.epoch}, "
            f"batch {state.clock.batch}, rank {state.rank}: {error}\n"
            f"  at   {where}\n"
            f"  fix  fix it, or {one.plugin.way_out}",
            stacklevel=2,
        )
