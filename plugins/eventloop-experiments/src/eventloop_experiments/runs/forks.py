"""Runs as forks of a prepared process, on Linux; elsewhere each run is a new process."""

from __future__ import annotations

import json
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from eventloop.commands import ending_with_parent

_MESSAGE_BYTES = 2**16
# Names the file in which processes of torchrun record their failure; `fit` writes it, too.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


class Process(Protocol):
    """The process of a run; `subprocess.Popen` implements it."""

    returncode: Any

    def poll(self) -> int | None:
        """Returns the exit status, negative for a signal; None while it runs."""

    def send_signal(self, sig: int) -> None:
        """Sends a signal, if it still runs."""

    def terminate(self) -> None:
        """Sends SIGTERM."""


class ForkServer:
    """Starts runs as forks of a process that has already imported the modules that all of them need.

    Args:
        environment: environment variables of the runs.
        task: TASK of the runs.
        modules: modules that every run imports, whatever its options.
    """

    def __init__(
        self, environment: Mapping[str, str], task: str, modules: Iterable[str] = ()
    ) -> None:
        self._runs: list[_Fork] = []
        self.refusal = ""
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.setblocking(False)
        with theirs:
            arguments = [str(theirs.fileno()), task, *modules]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "eventloop_experiments.runs.fork_server", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                preexec_fn=ending_with_parent(),
            )

    @staticmethod
    def suits(argv: Sequence[str]) -> bool:
        """Whether a run can be a fork: it is one process, on a system that forks safely."""
        return sys.platform == "linux" and not any(
            argument.startswith("--nproc") for argument in argv
        )

    @property
    def is_usable(self) -> bool:
        """Whether the process can fork: it hasn't refused, and it hasn't ended."""
        return not self.refusal and self._process.poll() is None

    def start(
        self,
        argv: Sequence[str],
        log: int,
        error_file: Path,
        afresh: Callable[[], subprocess.Popen[bytes]],
    ) -> Process:
        """Starts a run.

        Args:
            log: descriptor that the run writes its output to.
            error_file: file in which the run records its failure.
            afresh: starts the run as a new process, if the fork is refused.
        """
        run = _Fork(self, len(self._runs), afresh)
        self._runs.append(run)
        request = {"run": run.number, "argv": [*argv], "variables": {ERROR_FILE: str(error_file)}}
        message = json.dumps(request).encode("ascii")
        try:
            self._connection.setblocking(True)
            socket.send_fds(self._connection, [message], [log])
        except OSError:  # the process has ended, or the command line is too long for a message
            run.start_afresh()
        finally:
            self._connection.setblocking(False)
        return run

    def send_signal(self, run: int, number: int) -> None:
        """Asks the server to signal a run; requests are handled in order."""
        try:
            self._connection.send(json.dumps({"run": run, "signal": number}).encode("ascii"))
        except OSError:  # the process has ended, and terminated its runs
            return

    def wait(self, timeout_s: float) -> None:
        """Waits until the process sends a message or ends, at most `timeout_s`."""
        select.select([self._connection], [], [], timeout_s)

    def receive(self) -> bool:
        """Reads the messages of the process; returns whether it still runs."""
        while True:
            try:
                data = self._connection.recv(_MESSAGE_BYTES)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            message = json.loads(data)
            self.refusal = message.get("refused", self.refusal)
            self._runs[message["run"]].update(message)

    def close(self) -> None:
        """Ends the process; running forks get SIGTERM."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


class _Fork:
    """A run as a fork; as a new process if the server can't fork it."""

    def __init__(
        self, server: ForkServer, number: int, afresh: Callable[[], subprocess.Popen[bytes]]
    ) -> None:
        self.number = number
        self.returncode: int | None = None
        self._server = server
        self._afresh = afresh
        self._process: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None
        self._signal = 0

    def update(self, content: Mapping[str, Any]) -> None:
        """Records a report of the server."""
        self._pid = content.get("pid", self._pid)
        self.returncode = content.get("status", self.returncode)
        if "refused" in content:
            self.start_afresh()

    def start_afresh(self) -> None:
        """Starts the run as a new process, unless it was signaled to stop."""
        if self._signal:
            self.returncode = -self._signal
        else:
            self._process = self._afresh()

    def poll(self) -> int | None:
        if self._process is None and self.returncode is None and not self._server.receive():
            if self.returncode is None and self._pid is None:
                self.start_afresh()
            elif self.returncode is None and not _is_alive(self._pid):
                self.returncode = -signal.SIGTERM
        if self._process is not None:
            self.returncode = self._process.poll()
        return self.returncode

    def send_signal(self, sig: int) -> None:
        self._signal = sig
        if self._process is not None:
            self._process.send_signal(sig)
        elif self.returncode is None:
            self._server.send_signal(self.number, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def _is_alive(pid: int | None) -> bool:
    """Whether a process runs; a zombie that its parent hasn't reaped yet doesn't count."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in ("Z", "X")
