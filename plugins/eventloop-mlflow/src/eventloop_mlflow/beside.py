"""A call in a thread, beside the training."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread, current_thread
from typing import Generic, TypeVar

T = TypeVar("T")
_THREADS: set[Thread] = set()


class Beside(Generic[T]):
    """Calls a function in a thread of its own, at once.

    A fork of the process, such as a worker of a data loader, waits until it has returned: the child
    would have the locks of modules that are half imported, and no thread that releases them.

    Args:
        call: what is called.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._future: Future[T] = Future()
        # A daemon: a process that is told to end twice doesn't wait for a server.
        thread = Thread(target=self._run, name="eventloop-mlflow", daemon=True)
        _THREADS.add(thread)
        thread.start()

    def is_done(self) -> bool:
        """Returns whether the call has returned or raised."""
        return self._future.done()

    def wait(self) -> None:
        """Waits until the call has returned or raised."""
        wait([self._future])

    def result(self) -> T:
        """Waits for the call; returns what it returned, or raises what it raised."""
        return self._future.result()

    def _run(self) -> None:
        try:
            self._future.set_result(self._call())
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self._future.set_exception(error)
        finally:
            _THREADS.discard(current_thread())


def _wait() -> None:
    for thread in _THREADS - {current_thread()}:
        thread.join()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks
    os.register_at_fork(before=_wait)
