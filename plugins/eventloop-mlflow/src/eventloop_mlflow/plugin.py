"""The plugin: sends a run to MLflow, and handles failures of the store."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eventloop import Moment, PluginError, hookimpl, is_interruption
from eventloop.toolbox import as_option, switch_off
from eventloop_mlflow.background_call import BackgroundCall
from eventloop_mlflow.names import (
    POINTS_AT_ONCE,
    Point,
    accepted_name,
    artifact_of,
    parameters,
    plain,
    tags,
)
from eventloop_mlflow.sender import SENDER, Surroundings

if TYPE_CHECKING:
    from eventloop import StateView, Url

_AGAIN_AFTER_S = 60.0
_MOST_WAITING = 100_000
_MOST_TEXTS = 1_000


class Mlflow:
    """Records a run in MLflow: parameters, metrics, texts, tags, the manifest, checkpoints, status.

    Args:
        tracking_uri: URI of the store; not set: MLFLOW_TRACKING_URI, or else a database mlflow.db in the
            working directory, which `mlflow ui` opens there.
        experiment: the experiment's name; not set: MLFLOW_EXPERIMENT_NAME, or else eventloop.
        run_name: the run's name; not set: the name of its folder.
        checkpoints: checkpoints to copy to the store. last: the newest, when a fit ends; all: each
            checkpoint when it is saved, during which training waits; none.
        on_error: what happens if numbers can't be written. raise: the training fails; warn: it continues
            with a warning, and the numbers are sent later.
        send_every_s: minimum time between sending numbers, in seconds; they are also sent at checkpoints.

    Raises:
        ValueError: an option has an invalid value.
    """

    def __init__(
        self,
        *,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        run_name: str | None = None,
        checkpoints: Literal["last", "all", "none"] = "last",
        on_error: Literal["raise", "warn"] = "raise",
        send_every_s: float = 5.0,
    ) -> None:
        if checkpoints not in ("last", "all", "none"):
            raise ValueError(f"checkpoints={checkpoints!r} is none of last, all, none")
        if on_error not in ("raise", "warn"):
            raise ValueError(f"on_error={on_error!r} is neither raise nor warn")
        if not (send_every_s >= 0 and math.isfinite(send_every_s)):
            raise ValueError(f"send_every_s={send_every_s!r} is not a number of seconds")
        self.tracking_uri = tracking_uri
        self.experiment = experiment
        self.run_name = run_name
        self.checkpoints = checkpoints
        self.on_error = on_error
        self.send_every_s = send_every_s
        self._begin: Callable[[], str] | None = None
        self._background: BackgroundCall | None = None
        # The run's id in MLflow: once it has begun in this process, and as known from a checkpoint.
        self._run: str | None = None
        self._run_id: str | None = None
        self._surroundings: Surroundings | None = None
        # Points that a killed process wrote after the checkpoint from which this process resumes.
        self._there: Counter[tuple[str, int]] = Counter()
        self._was_loaded = False
        self._waiting: list[Point] = []
        self._texts: dict[str, str] = {}  # by path of the artifact
        # Points and texts being sent; only the thread uses them while it runs.
        self._points_out: list[Point] = []
        self._texts_out: dict[str, str] = {}
        self._num_lost = self._num_texts_lost = 0
        self._send_at = 0.0
        self._is_failing = False
        self._last_checkpoint: Path | None = None
        # The number of points sent for the latest step, by name.
        self._step = 0
        self._num_sent: Counter[str] = Counter()

    @staticmethod
    def start_early() -> None:
        """Starts the process that imports and calls MLflow, while the task's file loads."""
        with suppress(OSError):  # tried again, and reported, when it is needed
            SENDER.start()

    @hookimpl(rank_zero=True)
    def after_load(self, state: StateView) -> None:
        """Resolves the tracking URI early, since a task may change the working directory."""
        self.tracking_uri = (
            self.tracking_uri
            or os.environ.get("MLFLOW_TRACKING_URI")
            or f"sqlite:///{Path.cwd() / 'mlflow.db'}"
        )

    @hookimpl(wrapper=True)
    def fit_start(self, state: StateView) -> Generator[None, None, None]:
        """Starts or resumes the run in MLflow, once this process holds the run's lock."""
        yield
        if state.rank == 0:
            self._surroundings = Surroundings.now()
            if self._run is None:
                self._begin = self._beginning(state)
                # A database takes seconds to open: the first batch doesn't wait for it.
                self._background = BackgroundCall(self._begun)
            else:
                self._now(lambda: self._call("set_status", "RUNNING"))

    @hookimpl(rank_zero=True)
    def log(self, state: StateView, numbers: dict[str, float], at: Moment) -> None:
        """Queues the numbers."""
        if at.batch > self._step:
            self._step = at.batch
            self._num_sent = Counter()
        now_ms = time.time_ns() // 1_000_000
        for name, value in numbers.items():
            valid_name = accepted_name(name)
            self._num_sent[valid_name] += at.batch == self._step
            self._waiting.append(Point(valid_name, _float(value), at.batch, now_ms))
        self._num_lost += max(0, len(self._waiting) - _MOST_WAITING)
        del self._waiting[:-_MOST_WAITING]

    @hookimpl(rank_zero=True)
    def log_text(
        self, state: StateView, texts: dict[str, str | dict[str, list[Any]]], at: Moment
    ) -> None:
        """Queues the texts, each as a file: sending it again overwrites it."""
        for name, text in texts.items():
            self._texts.update([artifact_of(name, text, at.batch)])
        while len(self._texts) > _MOST_TEXTS:
            self._num_texts_lost += 1
            del self._texts[next(iter(self._texts))]

    @hookimpl(rank_zero=True)
    def batch_checkpoint(self, state: StateView) -> None:
        """Sends the numbers, if due, in a thread: the next batch doesn't wait for the store."""
        if self._background is None or self._background.is_done():
            self._settle()
            if time.perf_counter() >= self._send_at:
                self._start_sending()

    @hookimpl(rank_zero=True)
    def checkpoint_saved(self, state: StateView, path: Path | Url) -> None:
        """Copies a checkpoint, or remembers it for the end of the fit."""
        if not isinstance(path, Path):  # the checkpoint is in another store
            self._now(lambda: self._call("tag", "eventloop.checkpoint", str(path)))
        elif self.checkpoints == "all":
            self._now(lambda: self._call("add_files", str(path), "checkpoints"))
        elif self.checkpoints == "last":
            self._last_checkpoint = path

    @hookimpl(rank_zero=True, trylast=True)  # other plugins finish while the sender works
    def fit_end(self, state: StateView) -> None:
        """Sends the remaining data, and sets the run's final status."""
        self._end("KILLED" if is_interruption(state.stop_reason) else "FINISHED")

    @hookimpl(rank_zero=True)
    def exception(self, error: BaseException) -> None:
        """Marks the run as failed, or as killed."""
        is_mine = self._is_failing and self.on_error == "raise"
        if self._begin is not None and not is_mine:
            is_kill = isinstance(error, KeyboardInterrupt | SystemExit)
            self._end("KILLED" if is_kill else "FAILED")

    @hookimpl
    def close(self) -> None:
        """Discards the data that could not be sent, with a warning."""
        self._collect()
        num_lost = self._num_lost + len(self._points_out)
        num_texts = self._num_texts_lost + len(self._texts_out)
        if self._is_failing and self.on_error == "warn" and num_lost + num_texts:
            lost = f"{num_lost} numbers" + (f" and {num_texts} texts" if num_texts else "")
            warnings.warn(f"{lost} never reached {self.tracking_uri}", stacklevel=2)
        self._points_out = []
        self._texts_out = {}
        self._num_lost = self._num_texts_lost = 0

    def state_dict(self) -> dict[str, Any]:
        """Sends pending data; returns the run's id and the number of points of the latest step."""
        # At the start of a fit there is nothing to send, and the run can be found by its folder.
        if self._begin is not None and (self._waiting or self._texts or self._run is not None):
            self._now(self._send)
        of_this_run = {"run_id": self._run_id}
        return {"of_this_run": of_this_run, "step": self._step, "told": dict(self._num_sent)}

    def load_state_dict(self, state: Mapping[str, Any], version: str) -> None:
        """Restores the run's id; the run is looked up when training resumes."""
        self._was_loaded = True
        # Older checkpoints have the id next to the step.
        self._run_id = state.get("of_this_run", state)["run_id"]
        self._step = state["step"]
        self._num_sent = Counter(state["told"])

    def _beginning(self, state: StateView) -> Callable[[], str]:
        """Returns a function that begins or finds the run, to be called until it succeeds."""
        batch = state.clock.batch
        run_dir = str(state.run_dir.absolute())
        manifest = state.manifest
        # Resuming from an explicitly named checkpoint begins a new run.
        goes_on = (batch > 0 or self._was_loaded) and state.settings.resume == "auto"
        run_id = self._run_id
        step = self._step
        num_sent = dict(self._num_sent)
        start_ms = time.time_ns() // 1_000_000
        experiment = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "eventloop"
        description = parameters(manifest), tags(manifest), plain(manifest)

        # kept if a later call fails, so that a retry begins no second run
        new_run: str | None = None

        def begin() -> str:
            nonlocal new_run
            call = self._call_of
            existing_run = call(None, "again", experiment, run_id, run_dir) if goes_on else None
            if existing_run is not None:
                # Without a state in the checkpoint, only the batch at which it resumes is known. MLflow
                # can't delete a point: existing points are skipped when they are logged again.
                sent = {} if run_id is None else {(name, step): n for name, n in num_sent.items()}
                points = call(existing_run, "points_from", batch if run_id is None else step)
                self._there = Counter(map(tuple, points)) - Counter(sent)
                call(existing_run, "set_status", "RUNNING")
            elif new_run is None:
                name = self.run_name or Path(run_dir).name
                new_run = call(None, "begin", experiment, name, run_dir, start_ms)
            run: str | None = existing_run or new_run
            assert run is not None
            call(run, "describe", *description)
            return run

        return begin

    def _begun(self) -> None:
        if self._run is None:
            assert self._begin is not None
            self._run = self._run_id = self._begin()  # a failure here is retried

    def _call(self, method: str, *args: Any) -> Any:
        return self._call_of(self._run, method, *args)

    def _call_of(self, run_id: str | None, method: str, *args: Any) -> Any:
        assert self._surroundings is not None
        return SENDER.call(self._surroundings, str(self.tracking_uri), run_id, method, *args)

    def _start_sending(self) -> None:
        # Without a fit no run was begun, and nothing is recorded.
        if self._begin is not None:
            self._send_at = time.perf_counter() + self.send_every_s
            self._collect()
            self._in_thread(self._send)

    def _settle(self) -> None:
        """Waits for the thread, if any, and handles its failure."""
        if self._background is not None:
            self._background.wait()  # a Ctrl-C here leaves the data with the thread
            call = self._background
            self._background = None
            self._tried(call.result)

    def _now(self, call: Callable[[], None]) -> None:
        """Calls a function with the run, after the thread has finished, and waits for it."""
        self._settle()
        self._collect()
        self._in_thread(call)
        self._settle()

    def _in_thread(self, call: Callable[[], None]) -> None:
        def calls() -> None:
            self._begun()
            call()

        self._background = BackgroundCall(calls)

    def _collect(self) -> None:
        """Appends queued data to the data that could not be sent; only without a running thread."""
        self._points_out += self._waiting
        self._texts_out |= self._texts
        self._waiting = []
        self._texts = {}
        self._num_lost += max(0, len(self._points_out) - _MOST_WAITING)
        del self._points_out[:-_MOST_WAITING]
        while len(self._texts_out) > _MOST_TEXTS:
            self._num_texts_lost += 1
            del self._texts_out[next(iter(self._texts_out))]

    def _send(self) -> None:
        points = self._points_out
        texts = self._texts_out
        points[:] = [point for point in points if self._is_new(point)]
        while points:
            self._call("send", points[:POINTS_AT_ONCE])
            del points[:POINTS_AT_ONCE]
        while texts:
            path = next(iter(texts))
            self._call("add_text", path, texts[path])
            del texts[path]

    def _is_new(self, point: Point) -> bool:
        key = (point.name, point.step)
        if not self._there[key]:
            return True
        self._there[key] -= 1
        return False

    def _end(self, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
        def end() -> None:
            self._send()
            path = self._last_checkpoint
            self._last_checkpoint = None
            if path is not None:
                self._call("add_files", str(path), "checkpoints")
            self._call("set_status", status)

        self._now(end)

    def _tried(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # whatever a store and the way to it may raise
            problem = f"MLflow at {self.tracking_uri} fails: {error}"
            if self.on_error == "raise":
                self._is_failing = True
                raise PluginError(
                    problem,
                    fix="fix it, go on without with "
                    + as_option("mlflow", on_error="warn")
                    + ", or switch the "
                    "plugin off with " + switch_off("mlflow"),
                ) from error
            if not self._is_failing:
                self._is_failing = True
                warnings.warn(
                    f"{problem}; the run goes on, and numbers are sent later", stacklevel=2
                )
            self._send_at = time.perf_counter() + max(_AGAIN_AFTER_S, self.send_every_s)
        else:
            self._is_failing = False


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
