"""A call in a background thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread


class BackgroundCall:
    """Calls a function in a thread of its own, at once.

    Args:
        call: what is called.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._future: Future[None] = Future()
        # A daemon: a process that is told to end twice doesn't wait for a server.
        Thread(target=self._run, name="eventloop-mlflow", daemon=True).start()

    def is_done(self) -> bool:
        """Returns whether the call has returned or raised."""
        return self._future.done()

    def wait(self) -> None:
        """Waits until the call has returned or raised."""
        wait([self._future])

    def result(self) -> None:
        """Waits for the call; raises what it raised."""
        self._future.result()

    def _run(self) -> None:
        try:
            self._future.set_result(self._call())
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self._future.set_exception(error)
