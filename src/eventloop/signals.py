"""Signals: requests from outside to save a checkpoint or to stop the run.

While `fit` runs, a signal is a request: the current batch is finished, a checkpoint is saved, and
only then the fit ends. Outside of `fit` signals have their previous effect.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeGuard

if TYPE_CHECKING:
    from eventloop.distributed.processes import Processes
    from eventloop.state import State

# Windows has no SIGUSR1.
_SAVING = getattr(signal, "SIGUSR1", None)
_STOPPING = (signal.SIGTERM, signal.SIGINT)
# The attribute of a KeyboardInterrupt that comes from Ctrl-C.
_AGREED = "is_agreed_by_ranks"
StopKind = Literal["plugin", "signal", "loss", "pruned"]


class StopReason(str):
    """Why a run stops.

    Args:
        text: the reason.
        kind: the cause: a plugin; a signal, after which the run can be resumed; a loss that isn't
            finite; or "pruned" for a trial that isn't worth continuing.
        plugin: the plugin that requested the stop, with its package and version, if any.
    """

    kind: StopKind
    plugin: str | None

    # A checkpoint has the text; between ranks pickle carries the attributes as well.
    def __new__(cls, text: str, kind: StopKind = "plugin", plugin: str | None = None) -> Self:  # noqa: D102
        reason = super().__new__(cls, text)
        reason.kind = kind
        reason.plugin = plugin
        return reason


def interrupted(text: str, *, is_agreed: bool = False) -> KeyboardInterrupt:
    """Returns the exception for a Ctrl-C of the user.

    It is a KeyboardInterrupt, not an instance of a subclass: only for that very type Python ends a
    script by SIGINT, so that the shell knows and ends its loop, too (Python 3.11 to 3.14).

    Args:
        is_agreed: whether all ranks raise it after the same batch.
    """
    error = KeyboardInterrupt(text)
    vars(error)[_AGREED] = is_agreed
    return error


def is_interrupted(error: BaseException) -> bool:
    """Returns whether the user pressed Ctrl-C; a plugin that raises KeyboardInterrupt doesn't count."""
    return isinstance(error, KeyboardInterrupt) and _AGREED in vars(error)


class Terminated(SystemExit):
    """SIGTERM was received; the exit status is 143."""

    def __init__(self, text: str) -> None:
        super().__init__(128 + signal.SIGTERM)
        self.text = text

    def __str__(self) -> str:
        return self.text


class Signals:
    """A context manager that turns signals into requests to the run; can be entered once.

    SIGUSR1 requests a checkpoint; SIGTERM and the first SIGINT request a checkpoint and the end of
    the fit; a further SIGINT raises KeyboardInterrupt at once. Outside of the main thread, where
    Python has no handlers, and for ignored signals, nothing changes.

    Args:
        state: of the run.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._pid = os.getpid()
        self._previous: dict[int, Any] = {}
        self._received: int | None = None
        self._agreed: int | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (*_STOPPING, _SAVING):
                # None is a handler that Python can't put back.
                if number and signal.getsignal(number) not in (None, signal.SIG_IGN):
                    self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def agree(self, processes: Processes) -> bool:
        """Returns whether any rank was asked to stop. Collective; called when the fit is over."""
        signals_of_ranks = processes.all_gather(self._received)
        received = [number for number in signals_of_ranks if number is not None]
        self._agreed = received[0] if received else None
        return bool(received)

    def pass_on(self) -> None:
        """Raises for the signal that was received; called after the context was left.

        A previous handler is called first.

        Raises:
            KeyboardInterrupt: SIGINT came.
            Terminated: SIGTERM came.
        """
        if self._agreed is None:
            if self._received is not None:  # too late for the fit: the caller's handler gets it
                signal.raise_signal(self._received)
            return
        handler = self._previous.get(self._agreed)
        if self._received == self._agreed and _is_a_user_s(handler):
            handler(self._agreed, None)
        batch = self._state.clock.batch
        if self._agreed == signal.SIGINT:
            raise interrupted(f"interrupted after batch {batch}", is_agreed=True)
        raise Terminated(f"terminated after batch {batch}")

    def _receive(self, number: int, frame: FrameType | None) -> None:
        handler = self._previous[number]
        if os.getpid() != self._pid:
            _receive_in_fork(number, frame, handler)
        elif number == _SAVING:
            self._state.request_checkpoint()
            if _is_a_user_s(handler):
                handler(number, frame)
        elif self._received is None:
            self._received = number
            self._state.request_checkpoint()
            name = signal.Signals(number).name
            self._state.request_stop(
                f"rank {self._state.layout.label(self._state.rank)} received {name}", "signal"
            )
        elif number == signal.SIGINT:
            if _is_a_user_s(handler):
                handler(number, frame)
            raise interrupted("interrupted at once")


def is_agreed(error: BaseException) -> bool:
    """Returns whether all ranks raise this exception by agreement, so that none has failed."""
    return isinstance(error, Terminated) or (is_interrupted(error) and bool(vars(error)[_AGREED]))


def is_interruption(stop_reason: StopReason | None) -> bool:
    """Returns whether a signal stopped the run, which resumes when it is started again."""
    return stop_reason is not None and stop_reason.kind == "signal"


def status_of(stop_reason: StopReason | None) -> str:
    """Returns the status of a run: finished; interrupted, by a signal; pruned; or stopped."""
    if stop_reason is None:
        return "finished"
    return {"signal": "interrupted", "pruned": "pruned"}.get(stop_reason.kind, "stopped")


@contextmanager
def named_interrupts() -> Iterator[None]:
    """Has Ctrl-C raise `interrupted(...)`, to distinguish it from a plugin's KeyboardInterrupt."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise interrupted("interrupted")


def _is_a_user_s(handler: Any) -> TypeGuard[Callable[[int, FrameType | None], object]]:
    """Returns whether a handler is neither the system's, nor Python's, nor eventloop's."""
    return callable(handler) and handler not in (signal.default_int_handler, _interrupt)


def _receive_in_fork(number: int, frame: FrameType | None, handler: Any) -> None:
    """Handles a signal in a forked process, such as a DataLoader worker.

    Ignores Ctrl-C, which a terminal also sends to forks, as the batch must be finished.
    """
    if number == signal.SIGINT:
        return
    signal.signal(number, handler)
    if _is_a_user_s(handler):
        handler(number, frame)
    else:
        os.kill(os.getpid(), number)
