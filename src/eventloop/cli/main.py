"""The entry point of the command: runs a subcommand, and turns errors into an exit status."""

from __future__ import annotations

import errno
import gc
import os
import select
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import eventloop
from eventloop.cli.command_registry import COMMANDS, help_lines, run_added, run_core
from eventloop.cli.failure_report import report
from eventloop.cli.printing import short_warnings, write_out
from eventloop.distributed.process_ends import (
    INTERRUPTED,
    WRONG_USAGE,
    end_process,
    end_with_launcher,
    exit_status,
    has_launcher,
    in_ranks,
)
from eventloop.errors import UsageError
from eventloop.fixes import for_command
from eventloop.safe_text import one_line
from eventloop.signals import interrupted, is_interrupted, named_interrupts

SUCCESS = 0
BROKEN_PIPE = 141

_USAGE = "usage: eventloop COMMAND ...\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: the arguments after `eventloop`; by default the process's.

    Returns:
        0 on success, 1 when training fails, 2 for wrong usage, 4 when a checkpoint can't be used
        or written, 130 when interrupted, 143 when terminated, 141 when the output's reader is gone.

    Raises:
        KeyboardInterrupt: the command was interrupted. Python then ends the process by SIGINT, because
            after a mere status of 130 a shell would continue with its script.
    """
    with for_command():
        status = _main(argv)
    if argv is None and status == INTERRUPTED and not in_ranks():
        sys.excepthook = lambda *_: None  # the error has been reported already
        raise KeyboardInterrupt
    return status


def _main(argv: Sequence[str] | None) -> int:
    _open_streams()
    if argv is None:
        # Imports create little garbage, and collecting it takes time. `prepare`, and commands without
        # a task, enable it again.
        gc.disable()
    try:
        with short_warnings(), named_interrupts(), _among_ranks():
            status = _dispatch(list(sys.argv[1:] if argv is None else argv))
        write_out()
        if argv is None:
            gc.freeze()  # otherwise the interpreter examines all live objects when it exits
    # A plugin or task that calls sys.exit has failed, regardless of its status.
    except BaseException as error:  # noqa: BLE001 - every error is reported here
        if isinstance(error, BrokenPipeError) and _is_pipe_closed():
            return _end(BROKEN_PIPE)
        if (
            type(error) is KeyboardInterrupt
            and not is_interrupted(error)
            and not getattr(error, "__notes__", ())
        ):
            error = interrupted("interrupted")  # by the user: no plugin is blamed
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            error = UsageError(
                f"a path is too long: {one_line(str(error.filename), 100)}",
                fix="use a shorter path: 255 bytes per name, 4,095 in all on most systems",
            )
        report(error)
        return _end(exit_status(error))
    return status


@contextmanager
def _among_ranks() -> Iterator[None]:
    """Watches the other ranks, if a launcher has started this process; exits when all do."""
    if has_launcher():
        end_with_launcher()
    if not (in_ranks() and has_launcher()):
        yield
        return
    from eventloop.distributed.watchdog import watched_command  # only needed by ranks

    with watched_command():
        yield


def _open_streams() -> None:
    """Opens closed standard streams; otherwise the next opened file would become stdout."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - open to the end


def _end(status: int) -> int:
    """Returns the exit status of a failure; with several ranks, the process exits here."""
    if in_ranks():
        end_process(status)
    return status


def _dispatch(argv: list[str]) -> int:
    if not argv:
        sys.stderr.write(_help())
        return WRONG_USAGE
    name, *arguments = argv
    if name in ("-h", "--help"):
        write_out(_help())
        return SUCCESS
    if name == "--version":
        write_out(f"eventloop {eventloop.__version__}\n")
        return SUCCESS
    try:
        Path.cwd()
    except FileNotFoundError as error:
        message = "the current folder was deleted, or moved away"
        raise UsageError(message, fix="change to an existing folder: `cd ~`") from error
    return run_core(name, arguments) if name in COMMANDS else run_added(name, arguments)


def _help() -> str:
    command_lines = "".join(f"{line}\n" for line in help_lines())
    return (
        f"{_USAGE}\nTrains PyTorch models; installed plugins take part.\n\ncommands:\n{command_lines}\n"
        "`eventloop COMMAND --help` shows its options; `eventloop --version` the version.\n"
    )


def _is_pipe_closed() -> bool:
    """Returns whether stdout is the broken pipe; if so, redirects it to the null device.

    The interpreter flushes stdout when it exits, which would raise again.
    """
    if sys.platform == "win32":
        return False
    try:
        descriptor = sys.stdout.fileno()
    except OSError:  # replaced by an object that isn't a file
        return False
    poll = select.poll()
    poll.register(descriptor)
    broken = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    if broken:
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return broken
