"""The ends of processes on this machine: killing them, exiting, the report and status of an error."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from eventloop.config.value_sources import TOKEN_VARIABLE
from eventloop.errors import CheckpointError, EventloopError, UsageError, notes_of, text_of
from eventloop.safe_text import plain
from eventloop.signals import Terminated, is_interrupted

_FLUSH_S = 1.0
FAILURE = 1
WRONG_USAGE = 2
NO_CHECKPOINT = 4
INTERRUPTED = 130


def end_process(status: int) -> None:
    """Kills this process's workers and exits; never returns.

    A normal exit would wait for threads and process groups whose other ranks are gone, and workers of
    data loaders would notice the exit only five seconds later.
    """
    # Not imported, since an import here could wait for an import in another thread. A process that has
    # started workers has imported the module.
    processes = sys.modules.get("multiprocessing.process")
    for worker in processes.active_children() if processes else ():
        with contextlib.suppress(AssertionError):  # a fork inherits the list, but not the workers
            if worker.is_alive():
                worker.kill()
    # In a thread with a timeout: another thread that is stuck in a write holds the stream's lock.
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(_FLUSH_S)
    os._exit(status)


def kill_rank(pid: int, rank: int) -> None:
    """Kills a rank on this machine with its child processes, even if they are stopped.

    The process id comes from the store, to which other processes can write, too. So a process that
    isn't a rank of this run isn't killed.
    """
    if not _is_rank_of_run(pid, rank):
        return
    kill_group(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _is_rank_of_run(pid: int, rank: int) -> bool:
    """Whether a process is a rank of this process's run.

    A launcher starts ranks with their environment variables. Ranks that were forked by one process
    don't have these in `/proc/PID/environ`, but have the same parent and run the same program.
    """
    process = Path("/proc") / str(pid)
    if not Path("/proc/self/environ").exists():
        # Without /proc, the process can't be inspected. A record is trusted if a token sealed it.
        return bool(os.environ.get(TOKEN_VARIABLE))
    try:
        variables = process.joinpath("environ").read_bytes().split(b"\0")
        parent = process.joinpath("stat").read_text().rpartition(")")[2].split()[1]
        is_same_program = process.joinpath("exe").samefile("/proc/self/exe")
    except OSError:  # it is gone, or another user's
        return False
    names = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    shared_variables = [f"{name}={os.environ.get(name)}".encode() for name in names]
    is_started_as_rank = {f"RANK={rank}".encode(), *shared_variables} <= set(variables)
    return is_started_as_rank or (is_same_program and parent == str(os.getppid()))


def kill_group(pid: int) -> None:
    """Kills the remaining processes of a rank that was started in its own session.

    The session's id is the rank's process id, which the system doesn't reuse while a process of the
    session is running.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def members_of_group(pid: int) -> dict[int, str]:
    """Returns the names of the running processes of a rank's session, by process id.

    On systems other than Linux names can't be read: if any process is running, {pid: "?"}.
    """
    if sys.platform != "linux":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, 0)
            return {pid: "?"}
        return {}
    members = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = folder.joinpath("stat").read_text(errors="replace")
        except OSError:  # the process has just ended
            continue
        # `PID (NAME) STATE PARENT GROUP ...`, where the name can contain parentheses and spaces.
        pid_and_name, _, values = status.rpartition(")")
        state, _parent, group, *_ = values.split()
        is_running = state not in "ZX"  # zombie, dead
        if group == str(pid) and is_running:
            members[int(folder.name)] = pid_and_name.partition("(")[2]
    return members


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


_PR_SET_PDEATHSIG = 1  # from Linux's sys/prctl.h


def ending_with_parent() -> Callable[[], None] | None:
    """Returns a `preexec_fn` that has a process get SIGTERM when its parent ends; None except on Linux.

    Needed for a parent that is killed by SIGKILL, which it can't forward to its children.
    """
    if sys.platform != "linux":
        return None
    # Looked up before the fork: in the child, a lock that another thread held at the fork, such as the
    # allocator's, is never released.
    return functools.partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGTERM)


def has_launcher() -> bool:
    """Whether torchrun or eventloop's launcher started this rank; both wait for their ranks.

    Another launcher that sets RANK, such as a shell script, may exit before the ranks do.
    """
    return "TORCHELASTIC_USE_AGENT_STORE" in os.environ


def end_with_launcher() -> None:
    """Has the kernel kill this rank when its launcher ends, even if Python is blocked.

    It uses SIGKILL, because a rank that is stopped or holds the GIL handles no other signal. This can
    interrupt the writing of a checkpoint, which is safe, as with any kill.

    The kernel sends the signal when the thread that started this process ends: both launchers start
    ranks in the thread that waits for them. If the launcher ends before this call, connecting to its
    store fails. On systems other than Linux the watchdog notices that the store is gone.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@functools.cache
def this_machine() -> str:
    """Returns a digest that identifies this machine, its last boot and this container."""
    texts = [socket.gethostname()]
    for path in (Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")):
        try:
            texts.append(path.read_text() if path.name == "boot_id" else str(path.readlink()))
        except OSError:
            continue  # not Linux
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:8]


def is_alive(pid: int) -> bool:
    """Whether a process with this id exists; zombies count."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def in_ranks() -> bool:
    """Whether this process is one of several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def first_line(error: BaseException, rank: str = "") -> str:
    """Returns the first line of a report: the rank, the error, and the plugin that a note names."""
    line = summary(error)
    if not in_ranks() or _is_caused_by_signal(error):
        return line
    return f"rank {rank or os.environ['RANK']}: {line}"


def summary(error: BaseException) -> str:
    """Returns an error in one line, with the plugin that caused it if a note names the plugin."""
    text, *further_lines = text_of(error).split("\n")
    if text.startswith("Caught "):
        # torch re-raises an exception of a data loader's worker with a traceback in its text:
        # "Caught ValueError in DataLoader worker process 0.\n...\nValueError: the original text".
        prefix = f"{type(error).__name__}: "
        original_lines = [line for line in further_lines if line.startswith(prefix)]
        if original_lines:
            text = f"{original_lines[-1].removeprefix(prefix)} ({text.rstrip('.')})"
    if _is_caused_by_signal(error):
        return text
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    about_plugins = notes_of(error, "plugins")
    notes = [note for note in getattr(error, "__notes__", []) if note and note not in about_plugins]
    if not isinstance(error, EventloopError) and notes:
        line = f"{line}; {notes[0].partition(chr(10))[0]}"
    return plain(line)


def _is_caused_by_signal(error: BaseException) -> bool:
    return is_interrupted(error) or isinstance(error, Terminated)


def exit_status(error: BaseException) -> int:
    """Returns the exit status: 2 for wrong usage, 4 for a checkpoint, 130 or 143 for a signal, else 1."""
    if is_interrupted(error):
        return INTERRUPTED
    if isinstance(error, Terminated):
        return 143
    if isinstance(error, CheckpointError):
        return NO_CHECKPOINT
    return WRONG_USAGE if isinstance(error, UsageError) else FAILURE


def details(error: BaseException) -> str:
    """Returns the lines of a report after the first: the rest of the message or a traceback, and notes."""
    if _is_caused_by_signal(error):
        return ""
    notes = list(getattr(error, "__notes__", []))
    if not isinstance(error, EventloopError):
        formatted = traceback.TracebackException.from_exception(error)
        formatted.__notes__ = notes
        return plain("".join(formatted.format()))
    further_lines = text_of(error).split("\n")[1:]
    return plain("".join(f"{line}\n" for line in [*further_lines, *notes]))
