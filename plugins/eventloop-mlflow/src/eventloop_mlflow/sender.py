"""Talks to MLflow in a separate process, so that its import and database don't hold the training's GIL."""

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

# `-c`, because a process of multiprocessing would run the user's script again.
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
    """The environment in which MLflow finds its settings and files: variables and working directory."""

    variables: Mapping[str, str]
    folder: str

    @classmethod
    def now(cls) -> Surroundings:
        """Returns the environment of this process."""
        return cls(dict(os.environ), str(Path.cwd()))


class SenderError(Exception):
    """A failure in the sender, with its message, or the end of its process."""


class Sender:
    """Calls methods of `TrackedRun` in another process; started on demand.

    It ends with this process, however this process ends: only this process holds the other end of its pipe.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._calling = Lock()
        self.starting = Lock()

    def start(self) -> subprocess.Popen[bytes]:
        """Starts the process, if it doesn't run."""
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
                with suppress(OSError):  # it has ended already; the first call reports it
                    _write(self._process.stdin, _encoded([*map(str, sys.path)]))
            return self._process

    def call(
        self, surroundings: Surroundings, uri: str, run_id: str | None, method: str, *args: Any
    ) -> Any:
        """Calls a method of a run, and returns its result; arguments and result are JSON, paths are text.

        Args:
            uri: URI of the store, in MLflow's format.
            run_id: id of the run; None for a method that begins or finds a run, and returns its id.

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
        """Ends the process immediately."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._drop()

    def forget(self) -> None:
        """Closes a fork's copies of the pipes: the process ends only when nothing can write to it."""
        if self._process is not None:
            self._process.returncode = 0  # it isn't the fork's child
            self._drop()
        self._calling = Lock()
        self.starting = Lock()

    def _drop(self) -> None:
        process = self._process
        self._process = None
        for pipe in (process.stdin, process.stdout) if process is not None else ():
            assert pipe is not None
            pipe.close()


def answer() -> None:
    """Answers the calls of another process until it ends; a call in progress is then abandoned."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # MLflow's own prints must not mix with the answers
    calls: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
    Thread(target=_work, args=(calls, answers), daemon=True).start()
    with suppress(Exception):  # end of the pipe, or an incomplete message
        for line in sys.stdin.buffer:
            calls.put(json.loads(line))
    os._exit(0)


def _work(calls: SimpleQueue[tuple[Any, ...]], answers: IO[bytes]) -> None:
    with suppress(Exception):  # the first call fails, too, and reports the reason
        importlib.import_module("mlflow.store.tracking.sqlalchemy_store")
    while True:
        surroundings, *call = calls.get()
        try:
            _go_to(Surroundings(*surroundings))
            from eventloop_mlflow.tracking import called

            result = (True, called(*call))
        except Exception as error:  # noqa: BLE001 - raised again by the caller
            result = (False, str(error) or repr(error))
        message = _encoded(result)
        answers.write(len(message).to_bytes(_SIZE_BYTES) + message)
        answers.flush()


def _go_to(surroundings: Surroundings) -> None:
    if dict(os.environ) != surroundings.variables:
        os.environ.clear()
        os.environ.update(surroundings.variables)
    with suppress(OSError):  # the folder was deleted
        os.chdir(surroundings.folder)


def _encoded(message: Any) -> bytes:
    return json.dumps(message, default=str).encode() + b"\n"


def _write(pipe: IO[bytes] | None, message: bytes) -> None:
    assert pipe is not None
    remaining = memoryview(message)
    while remaining:
        remaining = remaining[pipe.write(remaining) :]


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
