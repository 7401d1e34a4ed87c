"""The trials of a sweep: each is made once, run by one worker at a time, and ends once.

A trial is a row of Optuna's study in the state RUNNING, with the path of a folder; a file lock marks
that a worker is running it. The operating system releases the lock when the worker ends, however it
ends, and then any worker that sees the folder resumes the trial.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from filelock import FileLock, Timeout
from optuna.storages import RDBStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from eventloop_experiments.runs import Outcome, RunsFolder
from eventloop_experiments.sweep.pruning import PRUNED_AT
from eventloop_experiments.sweep.sweep_request import LAST, Sweep

PLACE = "place"
OUTCOME = "outcome.json"  # in a trial's folder
_STATES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}
_KILLS = "kills"
_REASON = "reason"
_EXHAUSTED = "exhausted"  # attribute of a study: its sampler has tried all values
_MAX_KILLS = 3


@dataclass(frozen=True)
class TrialRun:
    """A trial as a run of `eventloop fit`.

    Args:
        number: Optuna's number of the trial.
        values: the values of its options, as typed.
    """

    number: int
    place: Path
    argv: tuple[str, ...] = field(repr=False)
    values: dict[str, str] = field(repr=False)

    def __str__(self) -> str:
        values = (f"{name} {_short(value)}" for name, value in self.values.items())
        return f"trial {self.number} ({', '.join(values)})"


TrialOutcome = Outcome[TrialRun]


class Trials:
    """Assigns trials of a study to this worker.

    Args:
        lock: lock of the sweep: workers take trials one at a time.
        metric: the metric that is a trial's value.
    """

    def __init__(
        self,
        sweep: Sweep,
        folder: RunsFolder,
        study: optuna.Study,
        storage: RDBStorage,
        lock: FileLock,
        metric: str,
    ) -> None:
        self._sweep = sweep
        self._folder = folder
        self._metric = metric
        self._study = study
        self._storage = storage
        self._lock = lock
        self._study_id = storage.get_study_id_from_name(study.study_name)
        self._held: dict[int, FileLock] = {}
        # An exhausted sampler calls `stop`, which raises in Optuna outside of `optimize`.
        study.stop = self._exhausted  # type: ignore[method-assign]

    def runs(self) -> Iterator[TrialRun]:
        """Yields runs until the requested number of trials is begun and no trial is abandoned."""
        while (run := self._next()) is not None:
            outcome = self._folder.outcome(run)
            if outcome is None:
                yield run
            else:  # its worker was killed before it recorded the outcome
                self.end(outcome)

    def end(self, outcome: TrialOutcome) -> str:
        """Records the outcome of a trial in the study, and in a file in its folder.

        Returns:
            "complete", "pruned" or "failed"; "" for a killed trial, which is resumed.
        """
        run = outcome.run
        trial_id = self._id(run.number)
        attributes = self._storage.get_trial(trial_id).user_attrs
        if outcome.was_killed and attributes.get(_KILLS, 0) + 1 < _MAX_KILLS:
            self._storage.set_trial_user_attr(trial_id, _KILLS, attributes.get(_KILLS, 0) + 1)
        elif outcome.content is None:
            self._storage.set_trial_user_attr(trial_id, _REASON, outcome.reason)
            self._study.tell(run.number, state=TrialState.FAIL)
        elif PRUNED_AT in attributes:
            self._study.tell(run.number, state=TrialState.PRUNED)
        elif (value := self._value(outcome.content)) is None:
            self._storage.set_trial_user_attr(trial_id, _REASON, f"{self._metric} isn't finite")
            self._study.tell(run.number, state=TrialState.FAIL)
        else:
            self._study.tell(run.number, value)
        trial = self._storage.get_trial(trial_id)
        if trial.state.is_finished():
            self._folder.keep(
                f"{run.place.as_posix()}/{OUTCOME}",
                {
                    "trial": run.number,
                    "state": _STATES[trial.state],
                    "value": trial.value,
                    "pruned_at": trial.user_attrs.get(PRUNED_AT),
                    "reason": trial.user_attrs.get(_REASON),
                },
            )
        self._held.pop(run.number).release()
        return _STATES.get(trial.state, "")

    def _value(self, content: Mapping[str, Any]) -> float | None:
        """Returns the value of a trial: its metric at the last evaluation, or at the best."""
        if self._sweep.objective == LAST:
            value: float | None = content["metrics"].get(self._metric)
            return value
        is_higher = self._study.direction == StudyDirection.MAXIMIZE
        extremes: Mapping[str, float] = content["extremes"].get(self._metric, {})
        return extremes.get("max" if is_higher else "min")

    def num_left(self) -> int:
        """Returns the number of trials that aren't finished or not begun."""
        trials = self._all()
        num_done = sum(trial.state.is_finished() for trial in trials)
        num_asked = len(trials) if self._is_exhausted() else self._sweep.num_trials
        return max(0, num_asked - num_done)

    def _next(self) -> TrialRun | None:
        """Returns an abandoned trial, or else a new trial; None if all trials are begun."""
        with self._lock:
            return self._abandoned() or self._new()

    def _abandoned(self) -> TrialRun | None:
        for trial in self._all():
            folder = trial.user_attrs.get(PLACE)
            # Trials of workers on other machines have their folders there.
            if trial.state != TrialState.RUNNING or not folder or not self._path(folder).is_dir():
                continue
            lock = self._lock_of(folder)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            if self._storage.get_trial(self._id(trial.number)).state == TrialState.RUNNING:
                return self._taken(trial.number, folder, lock)
            lock.release()  # the trial ended after it was listed
        return None

    def _new(self) -> TrialRun | None:
        num_trials = len(self._all())
        if self._is_exhausted() or num_trials >= self._sweep.num_trials:
            return None
        folder = f"trial-{num_trials:04}-{secrets.token_hex(4)}"
        self._path(folder).mkdir()
        lock = self._lock_of(folder)
        lock.acquire(timeout=0)
        # Created with its folder: a kill after a separate write would leave a trial without a folder.
        template = create_trial(state=TrialState.RUNNING, user_attrs={PLACE: folder})
        trial_id = self._storage.create_new_trial(self._study_id, template)
        return self._taken(self._storage.get_trial(trial_id).number, folder, lock)

    def _exhausted(self) -> None:
        """Records for all workers that no untried value is left."""
        self._study.set_user_attr(_EXHAUSTED, True)

    def _is_exhausted(self) -> bool:
        return _EXHAUSTED in self._study.user_attrs

    def _taken(self, number: int, folder: str, lock: FileLock) -> TrialRun:
        """Returns a trial as a run; a trial that was begun before keeps its values."""
        self._held[number] = lock
        self._study.get_trials(
            deepcopy=False
        )  # fills Optuna's cache, which doesn't know the trial yet
        trial = Trial(self._study, self._id(number))
        values = self._sweep.suggested(trial)
        is_higher = self._study.direction == StudyDirection.MAXIMIZE
        metric = f"{'max' if is_higher else 'min'} {self._metric}"
        argv = self._sweep.argv(values, number, metric)
        return TrialRun(number, Path(folder), tuple(argv), values)

    def _all(self) -> list[FrozenTrial]:
        return self._storage.get_all_trials(self._study_id, deepcopy=False)

    def _id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)

    def _path(self, folder: str) -> Path:
        return self._folder.path / folder

    def _lock_of(self, folder: str) -> FileLock:
        return FileLock(self._path(f"{folder}.lock"))


def _short(text: str) -> str:
    """Returns a number with four significant digits; any other text unchanged."""
    try:
        return f"{float(text):.4g}"
    except ValueError:
        return text
