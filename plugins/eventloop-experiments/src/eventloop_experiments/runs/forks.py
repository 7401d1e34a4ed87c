"""Runs that are forked from a process which is prepared; elsewhere than on Linux each is a new one."""

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
# The variable with the file in which torchrun has its processes write why they failed; `fit` does.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


class Process(Protocol):
    """What is asked of the process of a run; `subprocess.Popen` has it."""

    returncode: Any

    def poll(self) -> int | None:
        """Returns the exit status, negative for a signal; None while it runs."""

    def send_signal(self, sig: int) -> None:
        """Sends a signal, if it still runs."""

    def terminate(self) -> None:
        """Sends SIGTERM."""


class ForkServer:
    """Starts runs as forks of one process, which has imported what all of them import.

    Args:
        environment: of the runs.
        task: TASK of the runs.
        modules: that each run imports, whatever its options are.
    """

    def __init__(
        self, environment: Mapping[str, str], task: str, modules: Iterable[str] = ()
    ) -> None:
        self._runs: list[_Fork] = []
        self.refusal = ""
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.setblocking(False)
        with theirs:
            what = [str(theirs.fileno()), task, *modules]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "eventloop_experiments.runs.fork_server", *what],
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
        return sys.platform == "linux" and not any(one.startswith("--nproc") for one in argv)

    @property
    def is_usable(self) -> bool:
        """Whether it forks: nothing speaks against it, and it hasn't ended."""
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
            log: the descriptor that it writes to.
            error_file: where it writes why it failed.
            afresh: starts it as a new process, where it can't be forked after all.
        """
        run = _Fork(self, len(self._runs), afresh)
        self._runs.append(run)
        asked = {"run": run.number, "argv": [*argv], "variables": {ERROR_FILE: str(error_file)}}
        message = json.dumps(asked).encode("ascii")
        try:
            self._connection.setblocking(True)
            socket.send_fds(self._connection, [message], [log])
        except OSError:  # it has ended, or the command line is longer than a message
            run.start_afresh()
        finally:
            self._connection.setblocking(False)
        return run

    def send_signal(self, run: int, number: int) -> None:
        """Has a signal sent to a run, in the order of what was asked before."""
        try:
            self._connection.send(json.dumps({"run": run, "signal": number}).encode("ascii"))
        except OSError:  # it has ended, and its runs were asked to end with it
            return

    def wait(self, timeout_s: float) -> None:
        """Waits until the process sends a message or ends, for `timeout_s` at most."""
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
        """Ends the process; runs that are under way get SIGTERM."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


class _Fork:
    """A run; where the server can't fork it, a process of its own."""

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
        """Records what the server reports about it."""
        self._pid = content.get("pid", self._pid)
        self.returncode = content.get("status", self.returncode)
        if "refused" in content:
            self.start_afresh()

    def start_afresh(self) -> None:
        """Starts it as a new process, unless it was asked to stop."""
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
    """Returns whether a process runs; one that has ended may wait for its new parent to notice."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in ("Z", "X")
