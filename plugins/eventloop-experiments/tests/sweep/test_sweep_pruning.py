"""The plugin that takes part in a trial."""

import json

import optuna
import pytest
from optuna.trial import TrialState

from eventloop import hookimpl
from eventloop_experiments.sweep.pruning import Pruning
from eventloop_testing import isolated_trainer, run_ranks, tiny_batches, tiny_task

PRUNER = "percentile:percentile=50.0,n_startup_trials=1,n_warmup_steps=2"


class Dies:
    name = "dies"
    free_options = ("batch",)

    def __init__(self, batch=None):
        self.batch = batch

    @hookimpl
    def batch_end(self, state):
        if state.clock.batch == self.batch:
            raise EOFError


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A study of its own database."""
    url = f"sqlite:///{tmp_path / 'study.db'}"
    monkeypatch.setenv("OPTUNA_STORAGE", url)
    return optuna.create_study(study_name="s", storage=url, direction="minimize")


def best_before(study):
    """Adds a trial that was as good as can be, so that any other is pruned."""
    distributions = {"x": optuna.distributions.FloatDistribution(0, 1)}
    values = dict.fromkeys(range(1, 10), 0.0)
    study.add_trial(
        optuna.trial.create_trial(
            value=0.0, params={"x": 0.5}, distributions=distributions, intermediate_values=values
        )
    )


def fit(folder, trial, dies=None, task=None, metric="min test/loss", **given):
    """Trains 9 batches in 3 epochs, and evaluates after each batch."""
    pruning = Pruning(study="s", trial=trial, metric=metric, pruner=PRUNER)
    settings = {"max_duration": "3ep", "eval_interval": "1ba", "checkpoint_interval": "2ba"}
    plugins = {"callbacks": [pruning], "algorithms": [dies or Dies()]}
    with isolated_trainer(folder, task, **plugins, **(settings | given)) as trainer:
        result = trainer.fit()
        return trainer.state.clock.batch, trainer.state.stop_reason, result.history


@pytest.mark.nightly
def test_each_evaluation_is_reported(tmp_path, study):
    """With the values that the run logs, counted from 1."""
    trial = study.ask()

    batch, reason, history = fit(tmp_path, trial.number)

    (found,) = study.trials
    assert (batch, reason) == (9, None)
    assert list(found.intermediate_values) == list(range(1, 10))
    assert found.intermediate_values[9] == history[-1]["test/loss"]


def test_a_trial_by_its_train_loss_runs_to_its_end(tmp_path, study):
    """No evaluation has it, and a task may have no data to evaluate with."""
    best_before(study)
    trial = study.ask()

    batch, reason, _ = fit(
        tmp_path, trial.number, task=tiny_task(eval_dataloaders=None), metric="min train/loss",
        eval_interval=None,
    )  # fmt: skip

    assert (batch, reason) == (9, None)
    assert study.trials[-1].intermediate_values == {}


def test_a_trial_that_is_worse_than_others_is_stopped(tmp_path, study):
    """After the evaluation that says so."""
    best_before(study)
    trial = study.ask()

    batch, reason, _ = fit(tmp_path, trial.number)

    assert (batch, reason) == (2, "pruned by sweep at evaluation 2")
    assert study.trials[1].user_attrs == {"pruned_at": 2}
    end = json.loads((tmp_path / "run" / "manifest.json").read_text())["end"]
    assert (end["status"], end["reason"], end["batch"]) == ("pruned", reason, 2)
    study.tell(trial.number, state=TrialState.PRUNED)
    assert study.trials[1].value == study.trials[1].intermediate_values[2]


def test_a_resumed_trial_reports_each_evaluation_once(tmp_path, study):
    """What was reported stays, and the count goes on where the checkpoint is."""
    trial = study.ask()
    with pytest.raises(EOFError):
        fit(tmp_path, trial.number, Dies(6))
    before = study.trials[0].intermediate_values

    fit(tmp_path, trial.number)

    found = study.trials[0].intermediate_values
    assert len(before) == 5
    assert list(found) == list(range(1, 10))
    assert before.items() <= found.items()


def test_a_trial_that_was_pruned_and_killed_stops_at_once(tmp_path, study):
    """Its worker hadn't told it: trained on it would be another trial than the study says."""
    trial = study.ask()
    with pytest.raises(EOFError):
        fit(tmp_path, trial.number, Dies(6))
    trial.set_user_attr("pruned_at", 5)

    batch, reason, _ = fit(tmp_path, trial.number)

    assert reason == "pruned by sweep at evaluation 5"
    assert batch <= 6


def test_rank_0_reports_and_all_ranks_stop(tmp_path, study):
    """One row of the study is of all ranks."""
    best_before(study)
    trial = study.ask()

    def run(folder):
        return fit(folder, trial.number, task=tiny_task(train_dataloader=tiny_batches(18)))

    one, other = run_ranks(run, tmp_path)

    assert one[:2] == other[:2]
    assert one[0] < 9
    assert study.trials[1].user_attrs == {"pruned_at": 2}
