"""Talks to MLflow in a process of its own, so that its import and its database don't hold the GIL of training."""

from __future__ import annotations

import atexit
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import IO, Any, NamedTuple

# `-c`, as a process of multiprocessing would run the user's script once more.
_CODE = """
import json, signal, sys
for one in {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGINT)}:
    signal.signal(one, signal.SIG_IGN)  # sent to all of a group: training says when it ends
sys.path[:] = json.loads(sys.stdin.buffer.readline())
from eventloop_mlflow.sender import answer
answer()
"""
_SIZE_BYTES = 8


class Surroundings(NamedTuple):
    """Where MLflow finds its settings and its files: the variables, and the working directory."""

    variables: Mapping[str, str]
    folder: str

    @classmethod
    def now(cls) -> Surroundings:
        """Returns those of this process."""
        return cls(dict(os.environ), str(Path.cwd()))


class SenderError(Exception):
    """What failed in the sender, in its words; or how it ended."""


class Sender:
    """Calls methods of `TrackedRun` in another process; it is started when it is needed.

    It ends with this process, however this one ends: nothing else has the other end of its pipe.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._calling = Lock()
        self.starting = Lock()

    def start(self) -> subprocess.Popen[bytes]:
        """Starts the process, and another one in the place of one that has ended."""
        with self.starting:
            if self._process is not None and self._process.poll() is not None:
                self._drop()
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _CODE],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    bufsize=0,  # a fork must not find a lock or half a message in a buffer
                )
                with suppress(OSError):  # it has ended already, which the first call says
                    _write(self._process.stdin, _encoded([*map(str, sys.path)]))
            return self._process

    def call(
        self, surroundings: Surroundings, uri: str, run_id: str | None, method: str, *args: Any
    ) -> Any:
        """Returns what the method of a run returns; both ways as JSON, a path as text.

        Args:
            uri: of the store, as MLflow writes it.
            run_id: the run's; None for a method that begins or finds one, and returns its id.

        Raises:
            SenderError: the method raises, or the process ends.
        """
        message = _encoded((surroundings, uri, run_id, method, args))
        with self._calling:
            process = self.start()
            try:
                _write(process.stdin, message)
                size = int.from_bytes(_read(process.stdout, _SIZE_BYTES))
                is_well, value = json.loads(_read(process.stdout, size))
            except (OSError, EOFError) as error:
                self.stop()
                status = process.returncode
                raise SenderError(f"its process has ended, with status {status}") from error
        if not is_well:
            raise SenderError(value)
        return value

    def stop(self) -> None:
        """Ends the process, at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._drop()

    def forget(self) -> None:
        """Closes a fork's copies of the pipes: the process ends only when nothing can write to it."""
        if self._process is not None:
            self._process.returncode = 0  # no child of the fork's
            self._drop()
        self._calling = Lock()
        self.starting = Lock()

    def _drop(self) -> None:
        process = self._process
        self._process = None
        for one in (process.stdin, process.stdout) if process is not None else ():
            assert one is not None
            one.close()


def answer() -> None:
    """Answers the calls of another process until it ends; a call in progress is then abandoned."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what MLflow prints
    calls: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
    Thread(target=_work, args=(calls, answers), daemon=True).start()
    with suppress(Exception):  # the end, or half a message
        for line in sys.stdin.buffer:
            calls.put(json.loads(line))
    os._exit(0)


def _work(calls: SimpleQueue[tuple[Any, ...]], answers: IO[bytes]) -> None:
    with suppress(Exception):  # the first call fails, too, and says why
        importlib.import_module("mlflow.store.tracking.sqlalchemy_store")
    while True:
        surroundings, *call = calls.get()
        try:
            _go_to(Surroundings(*surroundings))
            from eventloop_mlflow.tracking import called

            result = (True, called(*call))
        except Exception as error:  # noqa: BLE001 - raised where the call came from
            result = (False, str(error) or repr(error))
        message = _encoded(result)
        answers.write(len(message).to_bytes(_SIZE_BYTES) + message)
        answers.flush()


def _go_to(surroundings: Surroundings) -> None:
    if dict(os.environ) != surroundings.variables:
        os.environ.clear()
        os.environ.update(surroundings.variables)
    with suppress(OSError):  # it was deleted
        os.chdir(surroundings.folder)


def _encoded(message: Any) -> bytes:
    return json.dumps(message, default=str).encode() + b"\n"


def _write(pipe: IO[bytes] | None, message: bytes) -> None:
    assert pipe is not None
    rest = memoryview(message)
    while rest:
        rest = rest[pipe.write(rest) :]


def _read(pipe: IO[bytes] | None, size: int) -> bytes:
    assert pipe is not None
    message = b""
    while len(message) < size:
        if not (some := pipe.read(size - len(message))):
            raise EOFError
        message += some
    return message


SENDER = Sender()
atexit.register(SENDER.stop)
if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks
    os.register_at_fork(
        before=lambda: SENDER.starting.acquire(),
        after_in_parent=lambda: SENDER.starting.release(),
        after_in_child=SENDER.forget,
    )
