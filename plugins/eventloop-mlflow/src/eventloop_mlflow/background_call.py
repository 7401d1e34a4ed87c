"""A call in a background thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread


class BackgroundCall:
    """Calls a function in a new thread, immediately.

    Args:
        call: the function.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._future: Future[None] = Future()
        # A daemon: after a second Ctrl-C the process must not wait for a server.
        Thread(target=self._run, name="eventloop-mlflow", daemon=True).start()

    def is_done(self) -> bool:
        """Whether the call has returned or raised."""
        return self._future.done()

    def wait(self) -> None:
        """Waits until the call has returned or raised."""
        wait([self._future])

    def result(self) -> None:
        """Waits for the call; raises its error."""
        self._future.result()

    def _run(self) -> None:
        try:
            self._future.set_result(self._call())
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self._future.set_exception(error)
