"""The process that runs are forked from: it has already imported the modules that every run needs.

`ForkServer` starts `python -m eventloop_experiments.runs.fork_server DESCRIPTOR TASK MODULE...` and talks
to it over a socket. The process only imports, so that a fork is in the same state as a new process after its
imports: no threads started, no random numbers drawn, no device opened. If an import violates this, the
process reports it and stops forking.

It imports eventloop's `fit`, the modules that every optimizer needs, the modules that the command adds to
each run, and the libraries that the task's file imports. Before each further run it also imports the
modules of torch and of other required packages that earlier runs imported. Plugins, the task's file and
modules beside it are imported by each run itself: they may draw random numbers, or change torch.
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
        connection: socket to the process that requests runs.
        task: TASK of the runs.
        modules: modules that every run imports, whatever its options.
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
        self._imported_by_runs: list[str] = []  # not yet imported here
        self._import(modules)

    def serve(self) -> Callable[[], None]:
        """Serves requests until the connection is closed; in a fork returns the fork's work."""
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

    def _obey(self, request: dict[str, Any], descriptors: list[int]) -> Callable[[], None] | None:
        """Executes a request; in the fork of a run returns the run's work."""
        run = request["run"]
        if "signal" in request:
            for pid, child in self._children.items():
                if child.run == run:
                    os.kill(pid, request["signal"])
            return None
        (log,) = descriptors
        try:
            self._import(self._imported_by_runs)
            self._imported_by_runs = []
            if self._refusal:
                self._send(run=run, refused=self._refusal)
                return None
            child = _Child(run, *_pipe())
            work = self._fork(child, lambda: _train(request["argv"], child))
            if work is not None:
                os.environ.update(request["variables"])
                os.dup2(log, 1)
                os.dup2(log, 2)
            return work
        finally:
            os.close(log)

    def _fork(self, child: _Child, work: Callable[[], None]) -> Callable[[], None] | None:
        """Forks; returns the work in the fork, and None here."""
        gc.freeze()  # a collection in the fork would copy all that it shares with this process
        # Blocked, so that the fork receives no signal before its own handlers are installed.
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
            self._send(run=child.run, pid=pid)
        return None

    def _reap(self) -> None:
        """Reports forks that have ended, and collects the modules that they imported."""
        for pid, child in [*self._children.items()]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._children[pid]
                if child.run is not None:
                    self._send(run=child.run, status=os.waitstatus_to_exitcode(status))
                names = child.imported()
                if child.run is None:
                    self._import(names)
                    continue
                self._packages = self._packages or _packages(self._modules)
                self._imported_by_runs += [
                    name for name in names if name.partition(".")[0] in self._packages
                ]

    def _import(self, names: Iterable[str]) -> None:
        states_before = rng_states()
        for name in names:
            if name not in sys.modules:
                # A run may have registered the name without a module file, or the import may not repeat.
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
        if not self._refusal:
            self._refusal = fork_obstacle(self._num_threads, states_before)

    def _send(self, **content: object) -> None:
        with contextlib.suppress(OSError):  # the other process has ended; `serve` notices it next
            self._connection.send(json.dumps(content).encode("ascii"))

    def _end(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGTERM)
        os._exit(0)


class _Child:
    """A fork.

    Args:
        run: its number; None for the scout.
        read_end, write_end: pipe through which the fork reports the modules that it imported.
    """

    def __init__(self, run: int | None, read_end: int, write_end: int) -> None:
        self.run = run
        self.read_end = read_end
        self.write_end = write_end

    def report(self, names: Iterable[str]) -> None:
        """Reports names of modules; called in the fork."""
        with contextlib.suppress(OSError):
            os.write(self.write_end, "\n".join(names).encode())

    def imported(self) -> list[str]:
        """Returns the reported names after the fork has ended; empty if it was killed."""
        with os.fdopen(self.read_end, "rb") as pipe:
            os.set_blocking(self.read_end, False)
            return (pipe.read() or b"").decode().split()


def _train(argv: list[str], child: _Child) -> None:
    """Runs `eventloop`, as `python -m eventloop` would."""
    preloaded = frozenset(sys.modules)
    atexit.register(lambda: child.report(name for name in [*sys.modules] if name not in preloaded))
    sys.argv = ["eventloop", *argv]
    try:
        runpy.run_module("eventloop", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if not isinstance(ended.code, int):
            raise
        status = ended.code
    except KeyboardInterrupt:  # the command ends with it
        status = 128 + signal.SIGINT
    else:
        status = 0
    _end(status, preloaded)


def _end(status: int, shared: Collection[str]) -> None:
    """Exits a fork as Python does, except for freeing the modules that it was forked with.

    Freeing them would take a second or more: each of their memory pages would be copied first.

    Args:
        shared: names of these modules.
    """
    # Private; multiprocessing ends its forks the same way. Checked with Python 3.11 to 3.13.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for name, module in [*sys.modules.items()]:
        if name not in shared and not _is_library(name):
            vars(module).clear()
    gc.collect()  # calls `__del__` of the run's objects, and closes their files
    for unclosed_file in gc.get_objects():
        if issubclass(type(unclosed_file), io.IOBase):
            with contextlib.suppress(OSError, ValueError):
                unclosed_file.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(status & 0xFF)


def _look(task: str, scout: _Child) -> None:
    """Imports the task's file; reports the libraries that it imports, not its own modules."""
    preloaded = frozenset(sys.modules)
    load_task_file(task)
    scout.report(name for name in [*sys.modules] if name not in preloaded and _is_library(name))
    _end(0, preloaded)


def _is_library(name: str) -> bool:
    if name.partition(".")[0] in sys.stdlib_module_names:
        return True
    origin = str(getattr(getattr(sys.modules[name], "__spec__", None), "origin", None))
    return any(Path(origin).is_relative_to(folder) for folder in _library_folders())


@functools.cache
def _library_folders() -> list[str]:
    schemes = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    return [*schemes, *site.getsitepackages(), site.getusersitepackages()]


def _packages(modules: Iterable[str]) -> frozenset[str]:
    """Returns the top-level packages of the core, of `modules`, of all their requirements, and of Python.

    Plugins aren't among them: a plugin may be off in the next run, and its import may change torch.
    """
    distributions_of = importlib.metadata.packages_distributions()
    required: set[str] = set()
    waiting = [_CORE]
    for module in modules:
        waiting += distributions_of.get(module.partition(".")[0], ())
    while waiting:
        name = _normal(waiting.pop())
        if name in required:
            continue
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            for line in importlib.metadata.requires(name) or []:
                requirement = re.match(r"[\w.-]+", line)
                if requirement is not None and "extra ==" not in line:
                    waiting.append(requirement[0])
        required.add(name)
    names = {
        package
        for package, distributions in distributions_of.items()
        if any(_normal(distribution) in required for distribution in distributions)
    }
    return frozenset({"eventloop", *names, *sys.stdlib_module_names})


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def rng_states() -> list[object]:
    """Returns the states of the random generators that a seed sets."""
    numpy = sys.modules.get("numpy")
    numbers = [] if numpy is None else [str(numpy.random.get_state())]
    return [random.getstate(), torch.get_rng_state().tolist(), *numbers]


def fork_obstacle(num_threads_before: int, states_before: list[object]) -> str:
    """Returns why a fork would differ from a new process because of an import; "" if it wouldn't."""
    if opened_accelerator() is not None or any(_open_devices()):
        return "an import has opened the GPU"
    if rng_states()[: len(states_before)] != states_before:
        return "an import has drawn random numbers"
    # Each further copy of OpenBLAS starts a pool as large as numpy's and stops it before a fork, so
    # multiples of the pool's size are harmless.
    num_started = num_threads() - num_threads_before
    pool_size = max(1, num_threads_before - 1)
    if threading.active_count() > 1 or (num_started and num_started % pool_size):
        return "an import has started threads"
    return ""


def _open_devices() -> Iterator[str]:
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = descriptor.readlink()
            if target.parts[:2] == ("/", "dev") and target.name.startswith("nvidia"):
                yield descriptor.name


def num_threads() -> int:
    """Returns the number of threads of this process, including threads of native code."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def _pipe() -> tuple[int, int]:
    read_end, write_end = os.pipe()
    with contextlib.suppress(OSError):  # larger than an unprivileged process may set
        fcntl.fcntl(write_end, _F_SETPIPE_SZ, _PIPE_BYTES)
    os.set_blocking(write_end, False)
    return read_end, write_end


if __name__ == "__main__":
    _ = Job  # imported with torch, as in any run
    every_run = "torch._dynamo"  # imported by the first optimizer of a process
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        work = Server(connection, sys.argv[2], [every_run, *sys.argv[3:]]).serve()
    work()
