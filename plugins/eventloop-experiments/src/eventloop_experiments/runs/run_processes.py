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
    """The outcome of a dry run.

    Args:
        err: its output on stderr.
        content: its result; None if it failed.
    """

    status: int
    err: str
    content: dict[str, Any] | None


def try_run(argv: Iterable[str], threads: int | None = None) -> Tried:
    """Makes a dry run, to find mistakes in the task before hours of training.

    Args:
        argv: command line of a run, from `fit` on.
    """
    with TemporaryDirectory(prefix="eventloop-") as folder:
        path = Path(folder, "result.json")
        # A dry run sets its own limits.
        words = [word for word in argv if not word.startswith("--limit-")]
        command = [*_command(words), "--dry-run", f"--result={path}"]
        process = subprocess.run(
            command, env=_environment(threads), capture_output=True, text=True, check=False
        )
        return Tried(
            process.returncode, process.stderr, read_json(RunFolder(path.parent), path.name)
        )


def check_rows(
    rows: Mapping[str, Sequence[str]],
    taking_part: Mapping[str, Iterable[str]] | None = None,
    *,
    jobs: int = 1,
    threads: int | None = None,
) -> None:
    """Makes a dry run of each row, to find all rows that can't be trained before training starts.

    Args:
        rows: the command line of each row, by the row's name in messages.
        taking_part: the algorithms that must be active in a row.

    Raises:
        PluginError: an algorithm doesn't suit the task, or a dry run fails; lists all problems.
        KeyboardInterrupt, Terminated: a signal was received.
    """
    runs = [_DryRun(name, idx, argv) for idx, (name, argv) in enumerate(rows.items())]
    with TemporaryDirectory(prefix="eventloop-") as folder:
        runs_folder = RunsFolder(Path(folder), "dry run")
        with RunProcesses[_DryRun](runs_folder, jobs=jobs, threads=threads) as processes:
            outcomes = [*processes.outcomes(runs)]
        if processes.is_stopped:
            raise processes.stopped("nothing was trained")
    problems = []
    for outcome in sorted(outcomes, key=lambda outcome: outcome.run.idx):
        off = {} if outcome.content is None else outcome.content["off"]
        required_plugins = (taking_part or {}).get(outcome.run.name, ())
        reasons = [f"{name} takes no part: {off[name]}" for name in required_plugins if name in off]
        if outcome.content is None:
            reasons.append(outcome.reason)
        problems += [f"{outcome.run.name}: {one_line(reason)}" for reason in reasons]
    if problems:
        raise PluginError(
            f"{counted(len(problems), 'problem')} in {counted(len(rows), 'row')}; nothing was trained",
            rows="\n    ".join(["", *problems]),
            fix="leave out plugins that don't suit the task, for example with `-p no:NAME`, or fix their options",
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
        # A dry run sets its own limits.
        words = (word for word in self.line if not word.startswith("--limit-"))
        return (*words, "--dry-run")


class RunProcesses(Generic[R]):
    """Trains each run in its own process; within its context, signals to stop are forwarded to the runs.

    On Linux the processes are forks of a process that has imported the shared modules, unless an import
    makes forks differ from new processes: see `fork_server`. Runs of several ranks are new processes.

    A run that is stopped saves a checkpoint, and resumes from it when it is started again.

    Args:
        folder: folder of all runs.
        jobs: number of parallel runs.
        threads: OMP_NUM_THREADS of a run; None leaves it unchanged.
        modules: modules that every run imports, whatever its options: a plugin that the command adds.
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
        """Starts runs, and yields the outcome of each when it ends.

        Ends early when a signal asks to stop; see `stopped`.

        Args:
            runs: advanced only when there is room for another run, so that the next run may depend on
                earlier outcomes.
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
            for process in self._ended():
                outcome = process.outcome(self._folder)
                # A run that was stopped resumes another time.
                if outcome.content is not None or not self._received:
                    yield outcome

    @property
    def is_stopped(self) -> bool:
        """Whether a signal asked to stop."""
        return bool(self._received)

    def stopped(self, remaining: str) -> BaseException:
        """Returns the exception to raise when a signal stopped the runs early.

        Args:
            remaining: the remaining work: "2 runs are left; the same line goes on".
        """
        if self._received and self._received[0] == signal.SIGTERM:
            return Terminated(f"terminated: {remaining}")
        return interrupted(f"interrupted: {remaining}")

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._pass_on) for number in _STOPPING}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        for running in self._under_way:
            running.process.terminate()
        if self._server is not None:
            self._server.close()
        self._errors.cleanup()

    def _start(self, run: R) -> None:
        """Starts a run in its own session: a Ctrl-C in the terminal reaches it once, from here.

        The run ends if this process is killed: otherwise it would block a later process that resumes it.
        """
        outputs = [
            f"--run-dir={self._folder.run_dir(run)}", f"--result={self._folder.result(run)}",
        ]  # fmt: skip
        argv = [*run.argv, *outputs]
        error_file = Path(self._errors.name, f"{self._num_started}.json")
        self._num_started += 1
        with os.fdopen(self._folder.open_log(run), "ab") as log:
            log_start = log.tell()
            process = self._forked(run, argv, log.fileno(), error_file)
            process = process or self._fresh(run, argv, error_file)
        self._under_way.append(_Process(run, process, log_start, error_file, time.monotonic()))
        if self._received:  # a signal came after `outcomes` checked for it
            process.send_signal(self._received[-1])

    def _forked(self, run: R, argv: Sequence[str], log: int, error_file: Path) -> Process | None:
        """Starts a run as a fork; returns None if it must be a new process."""
        if not ForkServer.suits(argv):
            return None
        if self._server is None:
            self._server = ForkServer(self._environment, run.argv[1], self._modules)
        if not self._server.is_usable:
            return None
        afresh = partial(self._fresh, run, argv, error_file)
        return self._server.start(argv, log, error_file, afresh)

    def _wait(self) -> None:
        """Waits for a message from the fork server, or for a short time."""
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
        """Yields the processes that have ended since the last call."""
        for process in [*self._under_way]:
            if process.process.poll() is not None:
                self._under_way.remove(process)
                yield process

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._received.append(number)
        for process in self._under_way:
            process.process.send_signal(number)


@dataclass(frozen=True)
class _Process(Generic[R]):
    """A run under way.

    Args:
        log_start: position in the log at which the output of this process begins.
        error_file: file in which the run records its failure.
    """

    run: R
    process: Process
    log_start: int
    error_file: Path
    began_at: float

    def outcome(self, folder: RunsFolder) -> Outcome[R]:
        """Returns the outcome of the run, after it has ended."""
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
    # -P: a file in the working directory must not shadow a module.
    return [sys.executable, "-P", "-m", "eventloop", *argv]


def _environment(threads: int | None) -> dict[str, str]:
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}  # logs are complete at any time
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment
