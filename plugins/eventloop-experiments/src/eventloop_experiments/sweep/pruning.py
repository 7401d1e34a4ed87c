"""The plugin added to each trial: reports its evaluations, and stops it when it is pruned."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import optuna
from optuna.storages import RDBStorage
from optuna.trial import Trial

from eventloop import hookimpl
from eventloop.toolbox import NamedMetric, find_metric
from eventloop_experiments.sweep.storage import STORAGE_VARIABLE, make_pruner, open_storage

if TYPE_CHECKING:
    from eventloop import StateView

PRUNED_AT = "pruned_at"
_OPTION = "--metric"


class Pruning:
    """Reports a trial's metric to Optuna after each evaluation, and stops the run when it is pruned.

    `eventloop sweep` adds it to its runs; the variable OPTUNA_STORAGE has the storage's URL.

    Args:
        study: the study's name.
        trial: the trial's number.
        metric: the metric to report.
        pruner: the pruner that decides, in the format of `--pruner`.
    """

    def __init__(self, *, study: str, trial: int, metric: str, pruner: str) -> None:
        self.study = study
        self.trial = trial
        self.metric = metric
        self.pruner = pruner
        self._num_evals = 0
        self._is_pruned = False
        self._storage: RDBStorage | None = None
        self._trial: Trial | None = None
        self._trial_id = 0
        self._named: NamedMetric | None = None

    @hookimpl
    def fit_start(self, state: StateView) -> None:
        """Opens the study; stops immediately if this trial was already pruned before it was killed."""
        if not self.metric.rpartition(" ")[2].startswith(
            "train/"
        ):  # never evaluated, so never pruned
            self._named = find_metric(_OPTION, self.metric, state)
        if state.rank:
            return
        self._storage = open_storage(os.environ[STORAGE_VARIABLE], is_new=False)
        study = optuna.load_study(
            study_name=self.study,
            storage=self._storage,
            sampler=optuna.samplers.RandomSampler(),  # unused: the sweep has already sampled the trial
            pruner=make_pruner(self.pruner),
        )
        study_id = self._storage.get_study_id_from_name(self.study)
        self._trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, self.trial)
        study.get_trials(deepcopy=False)  # fills Optuna's cache, which doesn't know the trial yet
        self._trial = Trial(study, self._trial_id)
        self._stop(state, self._trial.user_attrs.get(PRUNED_AT))

    @hookimpl(rank_zero=True)
    def eval_after_all(self, state: StateView) -> None:
        """Reports the metric, unless this evaluation was reported before a resume."""
        if self._trial is None or self._storage is None or self._named is None:
            return  # outside of a fit
        if self._is_pruned or self._named.eval_set not in state.eval_sets:
            return
        self._num_evals += 1
        if self._num_evals not in self._storage.get_trial(self._trial_id).intermediate_values:
            value = self._named.value(state.eval_metrics, _OPTION)
            self._trial.report(value, self._num_evals)
        if self._trial.should_prune():
            self._trial.set_user_attr(PRUNED_AT, self._num_evals)
            self._stop(state, self._num_evals)

    @hookimpl
    def close(self) -> None:
        """Closes the connection to the database."""
        if self._storage is not None:
            self._storage.remove_session()

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of evaluations so far."""
        return {"num_evals": self._num_evals}

    def load_state_dict(self, state: Mapping[str, Any], version: str) -> None:
        """Restores the number of evaluations."""
        self._num_evals = state["num_evals"]

    def _stop(self, state: StateView, pruned_at: int | None) -> None:
        if pruned_at is not None:
            self._is_pruned = True
            state.request_stop(f"pruned by sweep at evaluation {pruned_at}", "pruned")
