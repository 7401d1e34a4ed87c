"""Runs in separate processes, several at once; signals are forwarded, failures recorded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, Generic, NamedTuple, Self

from eventloop import PluginError
from eventloop.commands import Terminated, counted, ending_with_parent, interrupted, one_line
from eventloop.toolbox import RunFolder
from eventloop_experiments.runs.forks import ERROR_FILE, ForkServer, Process
from eventloop_experiments.runs.runs_folder import Outcome, R, RunsFolder, read_json

_POLL_S = 0.05
_STOPPING = (signal.SIGINT, signal.SIGTERM)


class Tried(NamedTuple):
    """What came of a dry run.

    Args:
        err: what it wrote to stderr.
        content: its result; None where it failed.
    """

    status: int
    err: str
    content: dict[str, Any] | None


def try_run(argv: Iterable[str], threads: int | None = None) -> Tried:
    """Makes a dry run, so that a mistake in the task shows before hours are spent.

    Args:
        argv: of a run: `fit`, and what follows.
    """
    with TemporaryDirectory(prefix="eventloop-") as folder:
        path = Path(folder, "result.json")
        # A dry run has limits of its own.
        words = [one for one in argv if not one.startswith("--limit-")]
        command = [*_command(words), "--dry-run", f"--result={path}"]
        done = subprocess.run(
            command, env=_environment(threads), capture_output=True, text=True, check=False
        )
        return Tried(done.returncode, done.stderr, read_json(RunFolder(path.parent), path.name))


def check_rows(
    rows: Mapping[str, Sequence[str]],
    taking_part: Mapping[str, Iterable[str]] | None = None,
    *,
    jobs: int = 1,
    threads: int | None = None,
) -> None:
    """Makes a dry run of each row, so that all that can't be trained shows before anything is.

    Args:
        rows: the command line of each, by the name that messages call it.
        taking_part: the algorithms that must take part in a row.

    Raises:
        PluginError: an algorithm doesn't suit the task, or a dry run fails; with all of them.
        KeyboardInterrupt, Terminated: a signal came.
    """
    runs = [_DryRun(name, idx, argv) for idx, (name, argv) in enumerate(rows.items())]
    with TemporaryDirectory(prefix="eventloop-") as folder:
        runs_folder = RunsFolder(Path(folder), "dry run")
        with RunProcesses[_DryRun](runs_folder, jobs=jobs, threads=threads) as processes:
            outcomes = [*processes.outcomes(runs)]
        if processes.is_stopped:
            raise processes.stopped("nothing was trained")
    problems = []
    for one in sorted(outcomes, key=lambda one: one.run.idx):
        off = {} if one.content is None else one.content["off"]
        wanted = (taking_part or {}).get(one.run.name, ())
        reasons = [f"{name} takes no part: {off[name]}" for name in wanted if name in off]
        reasons += [one.reason] if one.content is None else []
        problems += [f"{one.run.name}: {one_line(reason)}" for reason in reasons]
    if problems:
        raise PluginError(
            f"{counted(len(problems), 'problem')} in {counted(len(rows), 'row')}; nothing was trained",
            rows="\n    ".join(["", *problems]),
            fix="leave out what doesn't suit the task, `-p no:NAME` say, or fix its options",
        )


@dataclass(frozen=True)
class _DryRun:
    """A dry run of a row."""

    name: str
    idx: int
    line: Sequence[str] = field(hash=False)

    @property
    def place(self) -> Path:
        return Path(str(self.idx))

    @property
    def argv(self) -> Sequence[str]:
        # A dry run has limits of its own.
        words = (one for one in self.line if not one.startswith("--limit-"))
        return (*words, "--dry-run")


class RunProcesses(Generic[R]):
    """Trains, each run in its own process; what asks to stop is passed on, inside its context.

    On Linux the processes are forks of one that has imported what all runs import, where that changes
    nothing: see `fork_server`. Runs of several ranks are new processes.

    A run that is stopped saves a checkpoint, and goes on from there when it is started again.

    Args:
        folder: of all runs.
        jobs: how many at once.
        threads: of a run, for OMP_NUM_THREADS; None leaves that as it is.
        modules: that each run imports, whatever its options are: those of a plugin that the command
            adds to it.
    """

    def __init__(
        self,
        folder: RunsFolder,
        *,
        jobs: int = 1,
        threads: int | None = None,
        modules: Sequence[str] = (),
    ) -> None:
        self._folder = folder
        self._modules = modules
        self._jobs = jobs
        self._environment = _environment(threads)
        self._under_way: list[_Process[R]] = []
        self._received: list[int] = []
        self._previous: dict[int, Any] = {}
        self._server: ForkServer | None = None
        self._errors = TemporaryDirectory(prefix="eventloop-", ignore_cleanup_errors=True)
        self._num_started = 0

    def outcomes(self, runs: Iterable[R]) -> Iterator[Outcome[R]]:
        """Starts runs, and yields what came of each when it ends.

        It ends without the runs that are left when a signal asks to stop; see `stopped`.

        Args:
            runs: asked for the next one when there is room for it, so that it may depend on the
                outcomes so far.
        """
        waiting = iter(runs)
        while True:
            while len(self._under_way) < self._jobs and not self._received:
                if (run := next(waiting, None)) is None:
                    break
                self._start(run)
            if not self._under_way:
                return
            self._wait()
            for one in self._ended():
                outcome = one.outcome(self._folder)
                # One that was stopped goes on another time.
                if outcome.content is not None or not self._received:
                    yield outcome

    @property
    def is_stopped(self) -> bool:
        """Whether a signal asked to stop."""
        return bool(self._received)

    def stopped(self, left: str) -> BaseException:
        """Returns what to raise when a signal left runs to do.

        Args:
            left: what is left: "2 runs are left; the same line goes on".
        """
        if self._received and self._received[0] == signal.SIGTERM:
            return Terminated(f"terminated: {left}")
        return interrupted(f"interrupted: {left}")

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._pass_on) for number in _STOPPING}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        for one in self._under_way:
            one.process.terminate()
        if self._server is not None:
            self._server.close()
        self._errors.cleanup()

    def _start(self, run: R) -> None:
        """Starts a run, in a session of its own: a terminal's Ctrl-C comes once, from here.

        It ends when this process is killed: otherwise it would be in the way of one that goes on.
        """
        own = [f"--run-dir={self._folder.run_dir(run)}", f"--result={self._folder.result(run)}"]
        argv = [*run.argv, *own]
        error_file = Path(self._errors.name, f"{self._num_started}.json")
        self._num_started += 1
        with os.fdopen(self._folder.open_log(run), "ab") as log:
            log_start = log.tell()
            process = self._forked(run, argv, log.fileno(), error_file)
            process = process or self._fresh(run, argv, error_file)
        self._under_way.append(_Process(run, process, log_start, error_file, time.monotonic()))
        if self._received:  # after it was asked whether to start another
            process.send_signal(self._received[-1])

    def _forked(self, run: R, argv: Sequence[str], log: int, error_file: Path) -> Process | None:
        """Starts a run as a fork; returns None where it must be a new process."""
        if not ForkServer.suits(argv):
            return None
        if self._server is None:
            self._server = ForkServer(self._environment, run.argv[1], self._modules)
        if not self._server.is_usable:
            return None
        afresh = partial(self._fresh, run, argv, error_file)
        return self._server.start(argv, log, error_file, afresh)

    def _wait(self) -> None:
        """Waits a little, or until a fork ends."""
        if self._server is not None and self._server.is_usable:
            self._server.wait(_POLL_S)
        else:
            time.sleep(_POLL_S)

    def _fresh(self, run: R, argv: Sequence[str], error_file: Path) -> subprocess.Popen[bytes]:
        with os.fdopen(self._folder.open_log(run), "ab") as log:
            return subprocess.Popen(
                _command(argv),
                env=self._environment | {ERROR_FILE: str(error_file)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=ending_with_parent(),
            )

    def _ended(self) -> Iterator[_Process[R]]:
        """Yields those that have ended since it was last asked."""
        for one in [*self._under_way]:
            if one.process.poll() is not None:
                self._under_way.remove(one)
                yield one

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._received.append(number)
        for one in self._under_way:
            one.process.send_signal(number)


@dataclass(frozen=True)
class _Process(Generic[R]):
    """A run under way.

    Args:
        log_start: where what it writes begins in its log.
        error_file: where it writes why it failed.
    """

    run: R
    process: Process
    log_start: int
    error_file: Path
    began_at: float

    def outcome(self, folder: RunsFolder) -> Outcome[R]:
        """Returns what came of it, once it has ended."""
        seconds = time.monotonic() - self.began_at
        content = folder.content(self.run)
        log = folder.log(self.run)
        if content is not None and self.process.returncode == 0:
            return Outcome(self.run, content, "", log, seconds)
        was_killed = self.process.returncode < 0
        return Outcome(self.run, None, self._why_failed(log), log, seconds, was_killed)

    def _why_failed(self, log: Path) -> str:
        status = self.process.returncode
        if status < 0:
            return f"ended by {signal.Signals(-status).name}"
        files = RunFolder(self.error_file.parent)
        if (error := read_json(files, self.error_file.name)) is not None:
            return one_line(error["message"])
        text = log.read_bytes()[self.log_start :].decode(errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        return one_line(lines[-1] if lines else "") or f"ended with status {status}"


def _command(argv: Sequence[str]) -> list[str]:
    # -P: modules don't come from the working directory.
    return [sys.executable, "-P", "-m", "eventloop", *argv]


def _environment(threads: int | None) -> dict[str, str]:
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}  # who looks into a log sees all
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment
