"""The process that runs are forked from: it has imported what each of them would import first.

`python -m eventloop_experiments.runs.fork_server DESCRIPTOR TASK MODULE...` is started by `ForkServer`, and serves it
over a socket. It imports, and does nothing else, so that a fork is as a new process is behind its
imports: no thread has been started, no number drawn, no device opened. What it has seen to be otherwise
it reports, and forks no more.

Imported are eventloop's `fit`, what every optimizer needs, the modules that the command itself adds to
each run, the libraries that the task's file imports, and, when the next run begins, what earlier ones
have imported of torch, of the core's other requirements and of those of these modules. Plugins, the
task's file and modules beside it are imported by each run: they may draw numbers, or change torch.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import importlib.metadata
import io
import json
import os
import random
import re
import runpy
import select
import signal
import site
import socket
import sys
import sysconfig
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import rich.default_styles  # noqa: F401 - draws numbers, in a run before its seed is set
import torch

from eventloop.commands import Job, ending_with_parent, load_task_file
from eventloop.devices import opened_accelerator

MESSAGE_BYTES = 2**20
_POLL_S = 0.01
_PIPE_BYTES = 2**20
_F_SETPIPE_SZ = 1031  # from Linux's fcntl.h
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_CORE = "torch-eventloop"


class Server:
    """Forks runs on request and reports their outcomes.

    Args:
        connection: to the process that asks.
        task: TASK of the runs.
        modules: that each run imports, whatever its options are.
    """

    def __init__(self, connection: socket.socket, task: str, modules: Sequence[str]) -> None:
        self._connection = connection
        self._pid = os.getpid()
        self._end_with_parent = ending_with_parent()
        self._children: dict[int, _Child] = {}
        self._refusal = ""
        self._packages: frozenset[str] = frozenset()
        self._num_threads = num_threads()
        self._task = task
        self._modules = modules
        self._seen: list[str] = []  # what runs have imported, until another begins
        self._import(modules)

    def serve(self) -> Callable[[], None]:
        """Serves until the other end is closed; in a fork it returns what that is to do."""
        scout = _Child(None, *_pipe())
        if (work := self._fork(scout, lambda: _look(self._task, scout))) is not None:
            return work
        while True:
            ready, _, _ = select.select([self._connection], [], [], _POLL_S)
            if ready:
                data, descriptors, _, _ = socket.recv_fds(self._connection, MESSAGE_BYTES, 1)
                if not data:
                    self._end()
                if (work := self._obey(json.loads(data), descriptors)) is not None:
                    return work
            self._reap()

    def _obey(self, asked: dict[str, Any], descriptors: list[int]) -> Callable[[], None] | None:
        """Does what was asked; in the fork of a run it returns the run."""
        run = asked["run"]
        if "signal" in asked:
            for pid, child in self._children.items():
                if child.run == run:
                    os.kill(pid, asked["signal"])
            return None
        (log,) = descriptors
        try:
            self._import(self._seen)
            self._seen = []
            if self._refusal:
                self._tell(run=run, refused=self._refusal)
                return None
            child = _Child(run, *_pipe())
            work = self._fork(child, lambda: _train(asked["argv"], child))
            if work is not None:
                os.environ.update(asked["variables"])
                os.dup2(log, 1)
                os.dup2(log, 2)
            return work
        finally:
            os.close(log)

    def _fork(self, child: _Child, work: Callable[[], None]) -> Callable[[], None] | None:
        """Forks; returns the work in the fork, and None here."""
        gc.freeze()  # a collection in the fork would copy all that it shares with this process
        # A signal for the fork waits until it has handlers of its own.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            if self._end_with_parent is not None:
                self._end_with_parent()
            if os.getppid() != self._pid:
                os._exit(1)
            self._connection.close()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            return work
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os.close(child.write_end)
        self._children[pid] = child
        if child.run is not None:
            self._tell(run=child.run, pid=pid)
        return None

    def _reap(self) -> None:
        """Reports forks that have ended, and notes what they have imported."""
        for pid, child in [*self._children.items()]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._children[pid]
                if child.run is not None:
                    self._tell(run=child.run, status=os.waitstatus_to_exitcode(status))
                names = child.imported()
                if child.run is None:
                    self._import(names)
                    continue
                self._packages = self._packages or _packages(self._modules)
                self._seen += [one for one in names if one.partition(".")[0] in self._packages]

    def _import(self, names: Iterable[str]) -> None:
        before = rng_states()
        for name in names:
            if name not in sys.modules:
                # What it imported may be no module by this name, or not for the second time.
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
        if not self._refusal:
            self._refusal = why_not(self._num_threads, before)

    def _tell(self, **content: object) -> None:
        with contextlib.suppress(OSError):  # the other end is gone, and so is this one soon
            self._connection.send(json.dumps(content).encode("ascii"))

    def _end(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGTERM)
        os._exit(0)


class _Child:
    """A fork.

    Args:
        run: its number; None for the scout.
        read_end, write_end: of the pipe in which it names what it has imported.
    """

    def __init__(self, run: int | None, read_end: int, write_end: int) -> None:
        self.run = run
        self.read_end = read_end
        self.write_end = write_end

    def report(self, names: Iterable[str]) -> None:
        """Names modules, in the fork."""
        with contextlib.suppress(OSError):
            os.write(self.write_end, "\n".join(names).encode())

    def imported(self) -> list[str]:
        """Returns the names, once the fork has ended; none of one that was killed."""
        with os.fdopen(self.read_end, "rb") as pipe:
            os.set_blocking(self.read_end, False)
            return (pipe.read() or b"").decode().split()


def _train(argv: list[str], child: _Child) -> None:
    """Runs `eventloop`, as `python -m eventloop` would."""
    known = frozenset(sys.modules)
    atexit.register(lambda: child.report(one for one in [*sys.modules] if one not in known))
    sys.argv = ["eventloop", *argv]
    try:
        runpy.run_module("eventloop", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if not isinstance(ended.code, int):
            raise
        status = ended.code
    except KeyboardInterrupt:  # by which the command ends
        status = 128 + signal.SIGINT
    else:
        status = 0
    _end(status, known)


def _end(status: int, shared: Collection[str]) -> None:
    """Ends a fork as Python ends, but for the modules that it was forked with.

    To free these takes a second or more, since each page of them is copied first.

    Args:
        shared: the names of these modules.
    """
    # Private, and what multiprocessing ends its forks with; checked with Python 3.11 to 3.13.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for name, module in [*sys.modules.items()]:
        if name not in shared and not _is_library(name):
            vars(module).clear()
    gc.collect()  # calls `__del__`, and closes files, of what the run has made
    for one in gc.get_objects():
        if issubclass(type(one), io.IOBase):
            with contextlib.suppress(OSError, ValueError):
                one.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(status & 0xFF)


def _look(task: str, scout: _Child) -> None:
    """Imports the task's file; reports the libraries that it imports, not its own modules."""
    known = frozenset(sys.modules)
    load_task_file(task)
    scout.report(one for one in [*sys.modules] if one not in known and _is_library(one))
    _end(0, known)


def _is_library(name: str) -> bool:
    if name.partition(".")[0] in sys.stdlib_module_names:
        return True
    origin = str(getattr(getattr(sys.modules[name], "__spec__", None), "origin", None))
    return any(Path(origin).is_relative_to(one) for one in _library_folders())


@functools.cache
def _library_folders() -> list[str]:
    schemes = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    return [*schemes, *site.getsitepackages(), site.getusersitepackages()]


def _packages(modules: Iterable[str]) -> frozenset[str]:
    """Returns the packages of the core, of some modules and of what these require, and Python's own.

    A plugin that is off in another run is none of them: its import may change torch.
    """
    distributions_of = importlib.metadata.packages_distributions()
    required: set[str] = set()
    waiting = [_CORE]
    for one in modules:
        waiting += distributions_of.get(one.partition(".")[0], ())
    while waiting:
        name = _normal(waiting.pop())
        if name in required:
            continue
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            lines = importlib.metadata.requires(name) or []
            needed = [re.match(r"[\w.-]+", one) for one in lines if "extra ==" not in one]
            waiting += [one[0] for one in needed if one is not None]
        required.add(name)
    names = {
        package
        for package, distributions in distributions_of.items()
        if any(_normal(one) in required for one in distributions)
    }
    return frozenset({"eventloop", *names, *sys.stdlib_module_names})


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def rng_states() -> list[object]:
    """Returns the states of the random generators that a seed sets."""
    numpy = sys.modules.get("numpy")
    numbers = [] if numpy is None else [str(numpy.random.get_state())]
    return [random.getstate(), torch.get_rng_state().tolist(), *numbers]


def why_not(num_before: int, before: list[object]) -> str:
    """Returns what an import did that makes a fork differ from a new process; "" for nothing."""
    if opened_accelerator() is not None or any(_open_devices()):
        return "an import has opened the GPU"
    if rng_states()[: len(before)] != before:
        return "an import has drawn random numbers"
    # A further copy of OpenBLAS has a pool as large as numpy's, and stops it before each fork.
    grown = num_threads() - num_before
    if threading.active_count() > 1 or (grown and grown % max(1, num_before - 1)):
        return "an import has started threads"
    return ""


def _open_devices() -> Iterator[str]:
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = one.readlink()
            if target.parts[:2] == ("/", "dev") and target.name.startswith("nvidia"):
                yield one.name


def num_threads() -> int:
    """Returns how many threads this process has, those of native code among them."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def _pipe() -> tuple[int, int]:
    read_end, write_end = os.pipe()
    with contextlib.suppress(OSError):  # more than an unprivileged process may have
        fcntl.fcntl(write_end, _F_SETPIPE_SZ, _PIPE_BYTES)
    os.set_blocking(write_end, False)
    return read_end, write_end


if __name__ == "__main__":
    _ = Job  # imported with torch, as any run does
    every = "torch._dynamo"  # which the first optimizer of a process imports
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        work = Server(connection, sys.argv[2], [every, *sys.argv[3:]]).serve()
    work()
