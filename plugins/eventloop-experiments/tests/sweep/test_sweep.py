"""`eventloop sweep` as a whole: two workers, kills, pruning, and the best trial."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
import yaml
from optuna.trial import TrialState

import eventloop
import eventloop_experiments

pytestmark = pytest.mark.nightly  # a dozen starts of torch
SOURCE = [
    str(Path(eventloop_experiments.__file__).parents[1]),
    str(Path(eventloop.__file__).parents[1]),
]
CODE = "import sys; from eventloop_experiments.sweep import run; sys.exit(run(sys.argv[1:]))"
LINE = [
    "tiny.py", "--task.lr", "log:1e-3:1.0", "--clip-norm", "none,1.0", "--trials", "4",
    "--metric", "test/accuracy", "--run-dir", "here", "--jobs", "1", "--no-plugins",
    "--pruner", "median:n_startup_trials=2",
]  # fmt: skip


def start(folder, *argv):
    environ = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("EVENTLOOP_", "OPTUNA_"))
    }
    environ |= {"PYTHONPATH": os.pathsep.join([*SOURCE, str(folder)]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", CODE, *argv],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(found, workers, what):
    deadline = time.monotonic() + 300
    while not found():
        assert time.monotonic() < deadline, what
        for one in workers:
            assert one.poll() is None, one.communicate()[1]
        time.sleep(0.05)


def logs_with(folder, text):
    return [one for one in folder.glob("here/*.log") if text in one.read_text()]


@pytest.fixture(scope="module")
def swept(tmp_path_factory, tiny_text):
    """Two workers, both killed in the middle of a trial, one interrupted, and two that go on."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "pyproject.toml").touch()
    (folder / "tiny.py").write_text(tiny_text)
    (folder / "hold").touch()
    workers = [start(folder, *LINE) for _ in range(2)]
    wait_for(lambda: len(list(folder.glob("here/*/checkpoints/ba00000006"))) == 2, workers, "saved")
    for one in workers:
        one.send_signal(signal.SIGKILL)
        one.communicate()
    interrupted = start(folder, *LINE)
    wait_for(lambda: logs_with(folder, "resumed:"), [interrupted], "a trial that goes on")
    interrupted.send_signal(signal.SIGINT)
    (folder / "hold").unlink()
    told = interrupted.communicate(timeout=300)[1]
    status = interrupted.returncode
    last = [start(folder, *LINE), start(folder, *LINE, "--json")]
    outs = [one.communicate(timeout=300) for one in last]
    assert [one.returncode for one in last] == [0, 0], outs
    return folder, (status, told), outs


@pytest.fixture(scope="module")
def study(swept):
    folder, _, _ = swept
    return optuna.load_study(study_name="here", storage=f"sqlite:///{folder}/here/study.db")


def test_no_trial_is_lost_or_run_twice(swept, study):
    """Four were asked for, of two workers at a time, of which three were ended."""
    folder, _, _ = swept

    assert [one.number for one in study.trials] == [0, 1, 2, 3]
    assert {one.state for one in study.trials} <= {TrialState.COMPLETE, TrialState.PRUNED}
    places = [one.user_attrs["place"] for one in study.trials]
    assert sorted(places) == sorted(one.name for one in folder.glob("here/trial-*") if one.is_dir())
    for one, place in zip(study.trials, places, strict=True):
        log = (folder / "here" / f"{place}.log").read_text()
        assert log.count(" batches in ") == 1
        assert list(one.intermediate_values) == list(range(1, len(one.intermediate_values) + 1))


def test_killed_trials_go_on_from_their_checkpoints(swept):
    """Both that were under way had saved an epoch or more."""
    folder, _, _ = swept
    resumed = [one.read_text() for one in logs_with(folder, "resumed:")]

    assert len(resumed) == 2
    for log in resumed:
        assert re.search(r"^resumed: here/trial-.*/checkpoints/ba000000", log, re.MULTILINE)


def test_a_sweep_that_is_interrupted_says_how_to_go_on(swept):
    """Its trials have saved a checkpoint."""
    _, (status, told), _ = swept

    assert status
    assert "interrupted: 4 trials are left; the same line goes on" in told


def test_values_are_those_of_the_runs(swept, study):
    """What the study says of a trial is what its run ended with."""
    folder, _, _ = swept
    for one in study.trials:
        result = json.loads((folder / "here" / f"{one.user_attrs['place']}.json").read_text())
        assert one.value == result["metrics"]["test/accuracy"]
        is_pruned = (result["stop_reason"] or "").startswith("pruned by sweep")
        assert is_pruned == (one.state == TrialState.PRUNED)


def test_the_best_trial_is_a_line_and_a_file(swept, study):
    """Both train as the trial did; the worker that ends last knows the best of all trials."""
    folder, _, outs = swept
    line = next(one for one in outs[0][0].splitlines() if one.startswith("eventloop fit tiny.py"))
    content = yaml.safe_load((folder / "here" / "best.yaml").read_text())

    printed = json.loads(outs[1][0])
    lines = [shlex.split(one) for one in (line, printed["fit"])]
    assert any(f"--task.lr={study.best_params['task.lr']!r}" in one for one in lines)
    assert content["task"] == {"lr": study.best_params["task.lr"]}
    assert str(content["clip_norm"]).lower() == study.best_params["clip_norm"]
    values = [one.value for one in study.trials]
    assert all(one["value"] in (None, value) for one, value in zip(printed["trials"], values))
