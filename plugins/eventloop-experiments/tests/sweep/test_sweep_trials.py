"""Trials and workers: each trial is made once, run by one worker at a time, and ends once."""

import json
from pathlib import Path

import optuna
import pytest
from filelock import FileLock
from optuna.trial import TrialState

from eventloop_experiments.runs import Outcome, RunsFolder
from eventloop_experiments.sweep.pruning import PRUNED_AT
from eventloop_experiments.sweep.storage import make_sampler, open_storage, sqlite_url
from eventloop_experiments.sweep.sweep_request import read_command_line, read_sweep
from eventloop_experiments.sweep.trials import Trials

ARGV = ["tiny.py", "--task.lr", "0.0:1.0", "--trials", "4", "--run-dir", "here"]


@pytest.fixture
def worker(tiny):
    """Makes workers of one sweep, each with its own connection."""
    sweep = read_sweep(*read_command_line(ARGV))
    folder = RunsFolder(sweep.folder, "sweep")
    folder.begin(sweep.description)

    def make():
        storage = open_storage(sqlite_url(sweep.folder))
        study = optuna.create_study(
            study_name="here", storage=storage, direction="maximize", load_if_exists=True
        )
        return Trials(sweep, folder, study, storage, FileLock("here.lock"), "test/accuracy")

    return make


def states():
    study = optuna.load_study(study_name="here", storage="sqlite:///here/study.db")
    return [one.state for one in study.trials]


def outcome(run, value=0.5, **given):
    content = {"metrics": {"test/accuracy": value}, "stop_reason": None}
    return Outcome(run, **({"content": content, "reason": "", "log": run.place} | given))


def killed(worker):
    """The operating system gives the locks of a process up with it."""
    for lock in worker._held.values():
        lock.release()


def test_two_workers_share_the_trials(worker):
    """None is run twice, and there are as many as were asked for."""
    workers = [worker(), worker()]
    runs = [one.runs() for one in workers]

    taken = [next(runs[number % 2]) for number in range(4)]
    for number, run in enumerate(taken):
        assert next(runs[number % 2], None) is None
        workers[number % 2].end(outcome(run, number / 7))

    assert [one.number for one in taken] == [0, 1, 2, 3]
    assert len({one.place for one in taken}) == 4
    study = optuna.load_study(study_name="here", storage="sqlite:///here/study.db")
    assert [one.value for one in study.trials] == [number / 7 for number in range(4)]
    assert next(worker().runs(), None) is None


def test_what_a_killed_worker_left_is_gone_on_with_once(worker):
    """With the same values, in the same folder, by one of the others."""
    first, second, third = worker(), worker(), worker()
    left = next(first.runs())
    killed(first)

    again, other = next(second.runs()), next(third.runs())

    assert (again.number, again.place, again.argv) == (left.number, left.place, left.argv)
    assert other.number == 1


@pytest.mark.nightly
def test_a_trial_whose_worker_lives_is_left_alone(worker):
    """Control of the test above."""
    alive, other = worker(), worker()
    left = next(alive.runs())

    runs = other.runs()

    assert left.number not in [one.number for one in runs]


def test_a_kill_before_any_value_was_drawn_loses_no_trial(worker, monkeypatch):
    """The trial has its folder from its first moment."""

    def dies(*_):
        raise KeyboardInterrupt

    first = worker()
    with monkeypatch.context() as patched:
        patched.setattr("eventloop_experiments.sweep.trials.Trial.__init__", dies)
        with pytest.raises(KeyboardInterrupt):
            next(first.runs())
    killed(first)

    assert [one.number for one in worker().runs()] == [0, 1, 2, 3]


def test_a_result_without_a_row_is_told_and_not_run_again(worker):
    """The worker was killed between the two."""
    first, second = worker(), worker()
    run = next(first.runs())
    folder = RunsFolder(run.place.parent / "here", "sweep")
    content = {"metrics": {"test/accuracy": 0.75}, "stop_reason": None}
    folder.result(run).write_text(json.dumps(content))
    killed(first)

    assert next(second.runs()).number == 1
    study = optuna.load_study(study_name="here", storage="sqlite:///here/study.db")
    assert (study.trials[0].state, study.trials[0].value) == (TrialState.COMPLETE, 0.75)


def test_a_run_that_is_killed_is_tried_again_but_not_for_ever(worker):
    """One that takes all the memory would be killed each time."""
    sweep = worker()
    numbers = []
    for _ in range(3):
        run = next(sweep.runs())
        numbers.append(run.number)
        sweep.end(outcome(run, content=None, reason="ended by SIGKILL", was_killed=True))

    assert numbers == [0, 0, 0]
    assert states() == [TrialState.FAIL]
    assert next(sweep.runs()).number == 1


def test_what_failed_or_is_not_finite_is_a_failed_trial(worker):
    """Optuna takes no NaN, and its samplers learn nothing from failures."""
    sweep = worker()
    runs = sweep.runs()

    sweep.end(outcome(next(runs), content=None, reason="LookupError: nothing found"))
    sweep.end(outcome(next(runs), None))

    study = optuna.load_study(study_name="here", storage="sqlite:///here/study.db")
    assert states() == [TrialState.FAIL, TrialState.FAIL]
    reasons = [one.user_attrs["reason"] for one in study.trials]
    assert reasons == ["LookupError: nothing found", "test/accuracy isn't finite"]


def test_a_trial_that_was_pruned_is_marked_in_its_folder(worker):
    """It is neither complete nor failed, and a person who finds the folder can tell."""
    sweep = worker()
    runs = sweep.runs()
    complete, failed, pruned = (next(runs) for _ in range(3))
    trial_id = sweep._id(pruned.number)
    sweep._storage.set_trial_user_attr(trial_id, PRUNED_AT, 2)

    marks = [
        sweep.end(outcome(complete)),
        sweep.end(outcome(failed, content=None, reason="LookupError: nothing found")),
        sweep.end(outcome(pruned)),
    ]

    written = [
        json.loads((Path("here") / one.place / "outcome.json").read_text())
        for one in (complete, failed, pruned)
    ]
    assert marks == [one["state"] for one in written] == ["complete", "failed", "pruned"]
    assert [one["pruned_at"] for one in written] == [None, None, 2]


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_sampler_that_has_tried_everything_ends_the_sweep(tiny):
    """Three rates are three trials, however many were asked for, and for a worker that comes later."""
    argv = ["tiny.py", "--task.lr", "0.1,0.2,0.3", "--trials", "9", "--run-dir", "here"]
    sweep = read_sweep(*read_command_line(argv))
    folder = RunsFolder(sweep.folder, "sweep")
    folder.begin(sweep.description)

    def worker():
        storage = open_storage(sqlite_url(sweep.folder))
        study = optuna.create_study(
            study_name="here", storage=storage, load_if_exists=True, direction="maximize",
            sampler=make_sampler("bruteforce"),
        )  # fmt: skip
        return Trials(sweep, folder, study, storage, FileLock("here.lock"), "test/accuracy")

    first, rates = worker(), set()
    for run in first.runs():
        rates.add(run.values["task.lr"])
        first.end(outcome(run))

    later = worker()
    assert rates == {"0.1", "0.2", "0.3"}
    assert states() == [TrialState.COMPLETE] * 3
    assert (first.num_left(), later.num_left()) == (0, 0)
    assert next(later.runs(), None) is None


def test_trials_of_another_machine_are_left_to_it(worker):
    """Their folders, and what they go on from, are there."""
    first = worker()
    run = next(first.runs())
    killed(first)
    (run.place.parent / "here" / run.place.name).rmdir()

    assert next(worker().runs()).number == 1


@pytest.mark.parametrize(
    ("direction", "objective", "value"),
    [
        ("maximize", "last", 0.5),
        ("maximize", "best", 0.9),
        ("minimize", "last", 0.5),
        ("minimize", "best", 0.1),
    ],
)
def test_the_value_of_a_trial_is_its_last_evaluation_or_its_best(tiny, direction, objective, value):
    """A run that overfits at the end has had better weights, which `checkpoint_best` keeps."""
    sweep = read_sweep(*read_command_line([*ARGV, "--objective", objective]))
    folder = RunsFolder(sweep.folder, "sweep")
    folder.begin(sweep.description)
    storage = open_storage(sqlite_url(sweep.folder))
    study = optuna.create_study(study_name="here", storage=storage, direction=direction)
    trials = Trials(sweep, folder, study, storage, FileLock("here.lock"), "test/accuracy")
    run = next(trials.runs())
    content = {
        "metrics": {"test/accuracy": 0.5},
        "extremes": {"test/accuracy": {"min": 0.1, "max": 0.9}},
    }

    state = trials.end(outcome(run, content=content))

    assert (state, study.trials[0].value) == ("complete", value)


def test_a_trial_without_a_finite_evaluation_has_no_best(tiny):
    """As the last one that isn't finite is no value."""
    sweep = read_sweep(*read_command_line([*ARGV, "--objective", "best"]))
    folder = RunsFolder(sweep.folder, "sweep")
    folder.begin(sweep.description)
    storage = open_storage(sqlite_url(sweep.folder))
    study = optuna.create_study(study_name="here", storage=storage, direction="maximize")
    trials = Trials(sweep, folder, study, storage, FileLock("here.lock"), "test/accuracy")

    state = trials.end(outcome(next(trials.runs()), content={"metrics": {}, "extremes": {}}))

    assert state == "failed"
