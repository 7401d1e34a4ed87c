"""A thread that writes while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Writer:
    """Runs one task after the other in a thread, so that training goes on meanwhile.

    Attributes:
        failure: what a task raised, until it is cleared.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None

    def start(self, task: Callable[[], object]) -> None:
        """Begins a task, once the one before is done."""
        self.wait()

        def run() -> None:
            try:
                task()
            except BaseException as error:  # noqa: BLE001  told to who asks next
                self.failure = error

        # No daemon: an interpreter that ends waits for what is being written.
        self._thread = threading.Thread(target=run, name="eventloop-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Waits for the task under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def forget(self) -> BaseException | None:
        """Returns the failure and forgets it."""
        failure, self.failure = self.failure, None
        return failure
