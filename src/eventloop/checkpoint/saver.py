"""The core's plugin that decides when to save checkpoints, and saves them."""

from __future__ import annotations

import functools
import os
import platform
import threading
import warnings
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.nn.parameter import is_lazy

from eventloop.checkpoint.best import SETTING, Best
from eventloop.checkpoint.capture import Snapshot
from eventloop.checkpoint.checkpoint_export import FoundWeights, weights_and_states
from eventloop.checkpoint.retention import UNDER_WAY, new_id, to_keep
from eventloop.checkpoint.verifying import name_of
from eventloop.clock import Time
from eventloop.distributed.checkpoint_crew import ALONE
from eventloop.errors import (
    CheckpointError,
    EventloopError,
    ResumeError,
    SettingError,
    as_first,
    failures_of,
    text_of,
)
from eventloop.files import disk
from eventloop.files.run_folder import check_folder
from eventloop.fixes import as_set
from eventloop.hook_markers import hookimpl
from eventloop.signals import is_interruption
from eventloop.training.bookkeeping import resolved
from eventloop.training.metrics import followed
from eventloop.training.tensor_slices import held, holds_slices
from eventloop.training.weight_checks import are_finite, trained_names
from eventloop.urls import Url

if TYPE_CHECKING:
    from eventloop.checkpoint.locations import Storage
    from eventloop.config.settings import Settings
    from eventloop.distributed.checkpoint_crew import Crew
    from eventloop.distributed.processes import Processes
    from eventloop.plugin.plans import Plans
    from eventloop.state import State
    from eventloop.urls import Place

_PATIENCE_S = 5.0  # some network file systems show a new name seconds later


class Written(NamedTuple):
    """A checkpoint written by the background thread; resuming is automatic only if `is_usable`."""

    place: Place
    batch: int
    is_usable: bool


class Saver:
    """Saves checkpoints in the background when they are due; with sharding, every rank writes."""

    __slots__ = (
        "_best",
        "_hooks",
        "_interval",
        "_last_best",
        "_lock",
        "_num_newest",
        "_on_error",
        "_processes",
        "_retry",
        "_snapshot",
        "_store",
        "_surplus",
        "_writer",
        "_written",
    )

    def __init__(
        self, hooks: Plans, storage: Storage, settings: Settings, processes: Processes
    ) -> None:
        self._hooks = hooks
        self._processes = processes
        self._store = storage.store
        self._lock = storage.lock
        self._on_error = settings.on_save_error
        self._num_newest = settings.checkpoint_keep
        self._interval = interval_of(settings)
        self._snapshot = Snapshot()
        self._writer = Writer()
        self._written: Written | None = None  # `checkpoint_saved` wasn't called for it yet
        # If removing surplus checkpoints has failed: a function that tries again, and the reason.
        self._retry: Callable[[], object] | None = None
        self._surplus = ""
        self._best: Best | None = None
        self._last_best: dict[str, Any] = {}

    @hookimpl
    def after_load(self, state: State) -> None:
        requested_metric = state.settings.checkpoint_best
        if requested_metric is not None:
            self._best = Best(followed(SETTING, requested_metric, state))
            self._best.load_state_dict(self._last_best)
        if self._interval is not None:
            self._interval = resolved("checkpoint_interval", self._interval, state)

    @hookimpl
    def fit_start(self, state: State) -> None:
        self._writer.wait()  # it may still be running if a fit ended with an exception

        def begin() -> None:
            if self._lock is not None and state.rank == 0:
                self._lock.acquire()
                self._store.clear(alone=True)
                self._require_newest(state)
            if state.rank == 0:
                self.remove_surplus(state)

        as_first(self._processes.from_first, begin)
        folder = self._store.folder
        saves = self._interval is not None and state.world_size > 1
        if not saves or isinstance(folder, Url):  # each rank uploads its own files to a URL
            return
        if holds_slices(self._hooks.capture_model(state)):
            require_shared(folder, state)

    @hookimpl
    def eval_after_all(self, state: State) -> None:
        best = self._best
        if best is None or best.eval_set not in state.eval_sets:
            return
        if best.improves(state.eval_metrics, state.clock.batch):
            state.checkpoint_requested = True

    @hookimpl
    def batch_checkpoint(self, state: State) -> None:
        if self._writer.failure is not None and (failure := self._fatal_failure()) is not None:
            if state.world_size == 1:
                raise failure
            # Raising on this rank only would leave the others waiting. The end of the run raises it
            # on all ranks.
            self._writer.failure = failure
            state.request_stop("a checkpoint couldn't be written")
        if self._written is not None:
            self._tell_of_written(state)

    epoch_checkpoint = batch_checkpoint

    @hookimpl
    def should_checkpoint(self, state: State) -> bool:
        if state.checkpoint_requested or self._interval is None:
            return state.checkpoint_requested
        clock = state.clock
        # A run that was interrupted by a signal isn't at its end: another hook saves a checkpoint for
        # it, from which it continues.
        is_stopped = state.stop_reason is not None and not is_interruption(state.stop_reason)
        is_end = clock.reached(state.until) or is_stopped
        is_start = not clock.batch and not any(map(is_lazy, state.model.parameters()))
        return is_start or is_end or clock.crossed(self._interval)

    @hookimpl
    def save_checkpoint(self, state: State) -> Place:
        self._settle(state)
        parts, facts = state.capture()
        batch = state.clock.batch
        crew = self._processes.crew() if holds_slices(parts["model"]) else ALONE
        if state.rank == 0 or crew.world_size > 1:
            copies = self._snapshot.take(parts)
            names = trained_names(state.model)
            best = (
                (self._best.batch, self._best.batch_without(batch)) if self._best else (None, None)
            )
            write = functools.partial(self._write, crew, batch, copies, facts, names, best)
            self._writer.start(write)
        if not batch:
            self._settle(state)  # so that a run that can't save fails before it trains
        return self._store.folder / name_of(batch)

    @hookimpl
    def read_weights(self, state: State, path: Path, plugins: Collection[str]) -> FoundWeights:
        return weights_and_states(path, plugins)

    @hookimpl(wrapper=True)
    def fit_end(self, state: State) -> Generator[None, None, None]:
        self._settle(state)  # so that all of a fit's checkpoints are known at `fit_end`
        yield

    @hookimpl
    def close(self) -> None:
        self._writer.wait()
        if self._retry is not None:
            self._prune(self._retry)
            with suppress(CheckpointError, OSError):
                self._store.clear()  # a checkpoint may have been renamed but not removed
            self._warn_of_surplus()
        if self._lock is not None:
            self._lock.release()
        if self._writer.failure is not None and (failure := self._fatal_failure()) is not None:
            raise failure

    def best_place(self, state: State) -> Place | None:
        """Returns the best checkpoint's path or URL, or None if there is none. Collective.

        Waits until checkpoints that are being written are complete.
        """
        self._settle(state)
        best = self._best
        if best is None or best.batch is None:
            return None
        batch = best.batch

        def find() -> Place | None:
            checkpoints = [] if state.rank else self._store.found()
            return next(
                (
                    checkpoint.path
                    for checkpoint in checkpoints
                    if checkpoint.batch == batch and not checkpoint.reason
                ),
                None,
            )

        place = as_first(self._processes.from_first, find)
        if place is None and state.rank == 0:
            warnings.warn(
                f"the last weights are used: {name_of(batch)}, the checkpoint of the best "
                f"evaluation, isn't among those in {self._store.folder}",
                stacklevel=2,
            )
        return place

    def state_dict(self) -> dict[str, Any]:
        if self._best is None:
            return self._last_best
        return self._best.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._last_best = dict(state)

    def _require_newest(self, state: State) -> None:
        """Raises ResumeError if another process has continued this run."""
        current_batch = state.clock.batch
        # Only a usable checkpoint counts: the trainer passed over damaged ones when it was built.
        if (newest := self._store.newest_after(current_batch)) is not None:
            raise ResumeError(
                f"the run has continued to batch {newest} since this trainer was built at batch "
                f"{current_batch}",
                fix="build the trainer again, or set another run_dir",
            )

    def _write(
        self,
        crew: Crew,
        batch: int,
        parts: Mapping[str, Any],
        facts: Mapping[str, Any],
        names: Collection[str],
        best_batches: tuple[int | None, int | None],
    ) -> None:
        """Writes a checkpoint and deletes surplus ones, in the background thread.

        Args:
            names: the trained parameters, which are checked for NaN and infinity here, on the host,
                while training continues.
            best_batches: the batch counts of the best evaluation, and of the best evaluation if this
                batch's is ignored.
        """

        def check_weights() -> bool | None:
            self._snapshot.wait()
            if self._lock is not None and crew.rank == 0:
                self._lock.require()
            return are_finite(held(parts["model"]), names)

        answers = crew.run(check_weights)  # None from a rank that has no weights
        if False in answers:
            finite: bool | None = False
        else:
            finite = True if True in answers else None
        is_usable = finite is not False
        best = best_batches[0 if is_usable else 1]
        path: Any = self._store.save(batch, parts, {**facts, "finite": finite, "best": best}, crew)
        if crew.rank:
            return
        if self._num_newest is not None:
            # The ranks of a crew have read their files back, so the checkpoint is known to be usable.
            safe = path if is_usable and crew.world_size > 1 else None
            self._prune(functools.partial(self._keep, self._num_newest, batch, best, safe))
        self._written = Written(path, batch, is_usable)

    def _keep(self, num_newest: int, batch: int, best: int | None, safe: Any = None) -> None:
        self._store.prune(to_keep(self._store.found(), num_newest, batch, best), safe)

    def _prune(self, prune: Callable[[], object]) -> None:
        """Removes surplus checkpoints; a failure is kept for a warning, because it only costs space."""
        self._retry = None
        self._surplus = ""
        try:
            prune()
        except (CheckpointError, OSError) as error:
            self._retry = prune
            self._surplus = text_of(error)

    def remove_surplus(self, state: State) -> None:
        """Removes checkpoints that an earlier process couldn't remove. Rank 0 calls it at a start.

        Unusable checkpoints stay until the next checkpoint is saved.
        """
        if self._num_newest is None or not state.clock.batch:
            return
        num_newest = self._num_newest
        batch = state.clock.batch
        best = None if self._best is None else self._best.batch

        def prune() -> None:
            checkpoints = self._store.found()
            if len(checkpoints) <= num_newest:
                return
            passed_over = {checkpoint.batch for checkpoint in checkpoints if checkpoint.reason}
            self._store.prune(to_keep(checkpoints, num_newest, batch, best) | passed_over)

        self._prune(prune)
        self._warn_of_surplus()

    def tidy(self, state: State) -> None:
        """Removes surplus checkpoints of a finished run, unless another process uses it."""
        if self._lock is not None:
            try:
                self._lock.acquire()
            except (ResumeError, SettingError):
                return
        self._store.clear(alone=self._lock is not None)
        self.remove_surplus(state)

    def _warn_of_surplus(self) -> None:
        surplus = self._surplus
        self._surplus = ""
        if surplus:
            warnings.warn(
                "a surplus checkpoint couldn't be removed, and the run continues; the next save, the "
                f"end of the run and the next start try again: {surplus}",
                stacklevel=2,
            )

    def _settle(self, state: State) -> None:
        """Waits until everything is written; raises a failure of rank 0 on all ranks.

        Also raises if the run's folder no longer exists, or if another process has its lock.
        """
        self._writer.wait()
        if self._lock is not None and state.rank == 0 and self._writer.failure is None:
            (self._writer.failure,) = failures_of(self._lock.require) or (None,)
        failure = self._fatal_failure()
        (text, *_) = state.all_gather(None if failure is None else text_of(failure))
        if failure is not None:
            raise failure
        if text is not None:
            raise CheckpointError("rank 0: " + text)
        self._tell_of_written(state)

    def _tell_of_written(self, state: State) -> None:
        """Calls `checkpoint_saved`, on rank 0, for a checkpoint that the thread has written."""
        written = self._written
        self._written = None
        if written is None:
            return
        if self._best is not None and not written.is_usable:
            self._best.withdraw(written.batch)
        self._hooks.checkpoint_saved(state, written.place)
        self._warn_of_surplus()

    def _fatal_failure(self) -> BaseException | None:
        """Returns and clears the failure of a save; warns and returns None if the run continues."""
        failure = self._writer.failure
        self._writer.failure = None
        is_expected = isinstance(failure, CheckpointError | OSError)
        if failure is None or self._on_error == "raise" or not is_expected:
            return failure
        message = "a checkpoint wasn't saved, and the run continues: " + text_of(failure)
        warnings.warn(message, stacklevel=2)
        return None


class Writer:
    """Runs tasks in a thread, one after the other.

    Attributes:
        failure: the exception of a task; the caller resets it to None.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None

    def start(self, task: Callable[[], object]) -> None:
        """Starts a task when the previous one has finished."""
        self.wait()

        def run() -> None:
            try:
                task()
            except BaseException as error:  # noqa: BLE001  the main thread raises it
                self.failure = error

        # Not a daemon, so that the interpreter waits for the checkpoint before it exits.
        self._thread = threading.Thread(target=run, name="eventloop-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Waits for the running task."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def interval_of(settings: Settings) -> Time | None:
    """Returns the interval between checkpoints; "auto" is an epoch if the run has a folder."""
    if settings.checkpoint_interval == "auto":
        return Time("1ep") if settings.run_dir is not None else None
    return settings.checkpoint_interval


def require_shared(folder: Path, state: State) -> None:
    """Raises CheckpointError unless all ranks see a folder that rank 0 creates. Collective."""
    from eventloop.distributed.rank_store import wait_until  # not needed by a single process

    with new_id() as folder_id:

        def make() -> str:
            # A temporary folder's name: if this process is killed now, the next process removes it.
            name = f"{UNDER_WAY}{name_of(0)}-{folder_id}"
            try:
                if state.rank == 0:
                    check_folder(folder)
                    disk.make_folders(folder)
                    disk.make_folder(folder / name)
            except (OSError, EventloopError) as error:
                raise CheckpointError(
                    "the checkpoints' folder can't be used: " + text_of(error),
                    fix="set another folder, " + as_set(run_dir="FOLDER"),
                ) from error
            return name

        path = folder / as_first(lambda name: state.all_gather(name)[0], make)
        is_visible = wait_until(lambda: os.path.lexists(path), _PATIENCE_S)
        visibility: list[tuple[bool, str]] = state.all_gather((is_visible, platform.node()))
        if state.rank == 0:
            with suppress(OSError):
                disk.remove_empty(path)
    if blind := [rank for rank, (is_visible, _) in enumerate(visibility) if not is_visible]:
        raise CheckpointError(
            f"rank {blind[0]} on {visibility[blind[0]][1]!r} doesn't see what rank 0 on {visibility[0][1]!r} has made "
            f"in {str(folder)!r}, but each rank writes its share of a checkpoint there",
            fix="set a folder on a file system that all machines share, or the URL of a storage, "
            + as_set(run_dir="FOLDER"),
        )
