"""How a process of this machine ends: killed or by itself, with which report and status; and which exist."""

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

    A normal exit would wait for threads and process groups in which ranks are missing, and data
    loader workers would notice it five seconds later.
    """
    # Whatever starts workers has imported it; an import here could wait for another thread's.
    processes = sys.modules.get("multiprocessing.process")
    for worker in processes.active_children() if processes else ():
        with contextlib.suppress(AssertionError):  # a fork has its parent's list: not its workers
            if worker.is_alive():
                worker.kill()
    # A thread that is stuck in a write holds the lock of the stream.
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(_FLUSH_S)
    os._exit(status)


def kill_rank(pid: int, rank: int) -> None:
    """Kills a rank on this machine with its child processes, even if they are stopped.

    The store named its process, and anyone may have written there: a process that isn't a rank of
    this run stays.
    """
    if not _is_rank_of_run(pid, rank):
        return
    kill_group(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _is_rank_of_run(pid: int, rank: int) -> bool:
    """Returns whether a process is that of a rank of this process's run.

    A launcher's ranks have their variables from the start. Ranks that one process forked have not,
    but are children of the same parent, and run the same program.
    """
    process = Path("/proc") / str(pid)
    if not Path("/proc/self/environ").exists():
        # Nothing tells on this system, so only the run's token does.
        return bool(os.environ.get(TOKEN_VARIABLE))
    try:
        variables = process.joinpath("environ").read_bytes().split(b"\0")
        parent = process.joinpath("stat").read_text().rpartition(")")[2].split()[1]
        is_same_program = process.joinpath("exe").samefile("/proc/self/exe")
    except OSError:  # it is gone, or another user's
        return False
    names = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    own = [f"{name}={os.environ.get(name)}".encode() for name in names]
    is_started_as_rank = {f"RANK={rank}".encode(), *own} <= set(variables)
    return is_started_as_rank or (is_same_program and parent == str(os.getppid()))


def kill_group(pid: int) -> None:
    """Kills the remaining processes of a rank that was started in its own session.

    The session has the rank's process id, which isn't reused while one of them is running.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def members_of_group(pid: int) -> dict[int, str]:
    """Returns the running processes of a rank's session, by id with their names.

    Elsewhere than on Linux, where names can't be read, the group has the name "?".
    """
    if sys.platform != "linux":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, 0)
            return {pid: "?"}
        return {}
    members = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = folder.joinpath("stat").read_text(errors="replace").rpartition(")")
        except OSError:  # it has just ended
            continue
        state, _parent, group, *_ = rest.split()
        if group == str(pid) and state not in "ZX":
            members[int(folder.name)] = name.partition("(")[2]
    return members


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


_PR_SET_PDEATHSIG = 1  # from Linux's sys/prctl.h


def ending_with_parent() -> Callable[[], None] | None:
    """Returns a `preexec_fn` by which a process gets SIGTERM when its parent ends; None but on Linux.

    A process that gets SIGKILL can't forward it.
    """
    if sys.platform != "linux":
        return None
    # Looked up before the fork: after it nothing may be allocated that another thread guards.
    return functools.partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGTERM)


def has_launcher() -> bool:
    """Returns whether torchrun or eventloop's launcher started this rank; both wait for it.

    Something else that set RANK, such as a shell script, may end before the ranks do.
    """
    return "TORCHELASTIC_USE_AGENT_STORE" in os.environ


def end_with_launcher() -> None:
    """Has the kernel kill this rank when its launcher ends, even if Python is blocked.

    It uses SIGKILL, because a rank that is stopped or holds the GIL handles no other signal; a
    checkpoint may be interrupted, as by any kill. The kernel sends it when the thread that started
    this process ends: both launchers start ranks in the thread that waits for them. If the
    launcher has ended before, connecting to its store fails. On systems other than Linux the
    watchdog notices that the store is gone.
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
    """Returns whether a process with this id exists; a zombie does."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def in_ranks() -> bool:
    """Returns whether this process is one of several that train together."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def first_line(error: BaseException, rank: str = "") -> str:
    """Returns the error with its rank, and the plugin that caused it if a note names it."""
    line = summary(error)
    if not in_ranks() or _is_signal_s(error):
        return line
    return f"rank {rank or os.environ['RANK']}: {line}"


def summary(error: BaseException) -> str:
    """Returns the error, and the plugin that caused it if a note names it."""
    text, *more = text_of(error).split("\n")
    raised = [one for one in more if one.startswith(f"{type(error).__name__}: ")]
    if raised and text.startswith("Caught "):  # by a worker of a data loader
        text = f"{raised[-1].partition(': ')[2]} ({text.rstrip('.')})"
    if _is_signal_s(error):
        return text
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    about_plugins = notes_of(error, "plugins")
    notes = [one for one in getattr(error, "__notes__", []) if one and one not in about_plugins]
    if not isinstance(error, EventloopError) and notes:
        line = f"{line}; {notes[0].partition(chr(10))[0]}"
    return plain(line)


def _is_signal_s(error: BaseException) -> bool:
    return is_interrupted(error) or isinstance(error, Terminated)


def exit_status(error: BaseException) -> int:
    """Returns 2 for wrong usage, 4 for a checkpoint, 130 and 143 for signals, otherwise 1."""
    if is_interrupted(error):
        return INTERRUPTED
    if isinstance(error, Terminated):
        return 143
    if isinstance(error, CheckpointError):
        return NO_CHECKPOINT
    return WRONG_USAGE if isinstance(error, UsageError) else FAILURE


def details(error: BaseException) -> str:
    """Returns what follows the first line: the rest of the message, or a traceback, and notes."""
    if _is_signal_s(error):
        return ""
    notes = list(getattr(error, "__notes__", []))
    if not isinstance(error, EventloopError):
        shown = traceback.TracebackException.from_exception(error)
        shown.__notes__ = notes
        return plain("".join(shown.format()))
    rest = text_of(error).split("\n")[1:]
    return plain("".join(f"{line}\n" for line in [*rest, *notes]))
