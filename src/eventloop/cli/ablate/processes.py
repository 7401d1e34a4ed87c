"""Runs in processes of their own, several at once; signals are passed on, failures are kept."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from eventloop.cli.ablate.folder import Folder, read_json
from eventloop.cli.ablate.progress import Progress
from eventloop.cli.ablate.request import Ablation
from eventloop.cli.ablate.runs import NONE, Outcome, Run, Variant, fit_argv
from eventloop.failing.orphans import ending_with_parent
from eventloop.failing.plain import one_line
from eventloop.failing.signals import Interrupted, Terminated

_POLL_S = 0.05
_STOPPING = (signal.SIGINT, signal.SIGTERM)
# As `eventloop fit` begins its report of a failure.
_FAILURE = re.compile(r"(?:rank \d+: )?[A-Z]\w*(?:Error|Exception|Exit)(?::.*)?")


def run_all(
    runs: Iterable[Run], ablation: Ablation, folder: Folder, progress: Progress
) -> list[Outcome]:
    """Trains, each run in its own process; gives what came of each, in the order of their ends.

    Raises:
        Interrupted, Terminated: a signal came; the runs under way have saved a checkpoint.
    """
    waiting, under_way, outcomes = deque(runs), _UnderWay(ablation), list[Outcome]()
    with under_way.passing_signals_on():
        while under_way.processes or (waiting and not under_way.received):
            while waiting and len(under_way.processes) < ablation.jobs and not under_way.received:
                progress.started(waiting[0])
                under_way.start(waiting.popleft(), folder)
            time.sleep(_POLL_S)
            for one in under_way.ended():
                outcome = one.outcome(folder)
                if outcome.content is None and under_way.received:
                    waiting.append(one.run)  # it goes on another time
                    continue
                outcomes.append(outcome)
                progress.ended(outcome, time.monotonic() - one.began_at)
    if under_way.received and waiting:
        text = f"{len(waiting)} runs are left; the same line goes on"
        if under_way.received[0] == signal.SIGINT:
            raise Interrupted(f"interrupted: {text}")
        raise Terminated(f"terminated: {text}")
    return outcomes


def tried(ablation: Ablation) -> tuple[int, str, dict[str, Any] | None]:
    """Makes a dry run without the algorithms.

    Returns:
        Its exit status, what it wrote, and its result; None where it failed.
    """
    with TemporaryDirectory(prefix="eventloop-ablate-") as folder:
        path = Path(folder, "result.json")
        argv = fit_argv(ablation, Variant(NONE, ()))
        # A dry run has limits of its own.
        words = [one for one in argv if not one.startswith("--limit-")]
        command = [*_command(words), "--dry-run", f"--result={path}"]
        done = subprocess.run(
            command, env=_environment(ablation), capture_output=True, text=True, check=False
        )
        return done.returncode, done.stderr, read_json(path)


@dataclass(frozen=True)
class _Process:
    """A run under way.

    Args:
        log_start: where what it writes begins in its log.
    """

    run: Run
    process: subprocess.Popen[bytes]
    log_start: int
    began_at: float

    def outcome(self, folder: Folder) -> Outcome:
        """Gives what came of it, once it has ended."""
        done = folder.outcome(self.run)
        if done is not None and self.process.returncode == 0:
            return done
        log = folder.log(self.run)
        return Outcome(self.run, None, self._why_failed(log), log)

    def _why_failed(self, log: Path) -> str:
        status = self.process.returncode
        if status < 0:
            return f"ended by {signal.Signals(-status).name}"
        text = log.read_bytes()[self.log_start :].decode(errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        told = next(filter(_FAILURE.fullmatch, lines), lines[-1] if lines else "")
        return one_line(told) or f"ended with status {status}"


class _UnderWay:
    """The runs under way.

    Attributes:
        received: the signals that came, in order.
    """

    def __init__(self, ablation: Ablation) -> None:
        self._environment = _environment(ablation)
        self.processes: list[_Process] = []
        self.received: list[int] = []

    def start(self, run: Run, folder: Folder) -> None:
        """Starts a run, in a session of its own: a terminal's Ctrl-C comes once, from here.

        It ends when this process is killed: otherwise it would be in the way of one that goes on.
        """
        path = folder.log(run)
        path.parent.mkdir(parents=True, exist_ok=True)
        paths = [f"--run-dir={folder.run_dir(run)}", f"--result={folder.result(run)}"]
        with path.open("ab") as log:
            log_start = log.tell()
            process = subprocess.Popen(
                [*_command(run.argv), *paths],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=ending_with_parent(),
            )
            self.processes.append(_Process(run, process, log_start, time.monotonic()))

    def ended(self) -> Iterator[_Process]:
        """Gives those that have ended since it was last asked."""
        for one in [*self.processes]:
            if one.process.poll() is not None:
                self.processes.remove(one)
                yield one

    @contextmanager
    def passing_signals_on(self) -> Iterator[None]:
        """Passes what asks this process to stop on to the runs; kills them on an exception."""
        previous = {number: signal.signal(number, self._pass_on) for number in _STOPPING}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            for one in self.processes:
                one.process.terminate()

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)
        for one in self.processes:
            one.process.send_signal(number)


def _command(argv: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "eventloop", *argv]


def _environment(ablation: Ablation) -> dict[str, str]:
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}  # who looks into a log sees all
    if ablation.threads is not None:
        environment["OMP_NUM_THREADS"] = str(ablation.threads)
    return environment
