"""`eventloop sweep` in one process; `test_sweep.py` has several, and kills."""

import json
import shlex
from pathlib import Path

import optuna
import pytest
import yaml

import eventloop_sweep
from eventloop.commands import UsageError
from eventloop_sweep import run

LINE = ["tiny.py", "--task.lr", "log:1e-3:1.0", "--clip-norm", "none,1.0", "--trials", "2",
        "--metric", "test/accuracy", "--run-dir", "here", "--jobs", "2", "--no-plugins"]  # fmt: skip


def test_a_sweep_trains_and_says_what_was_best(tiny, monkeypatch, capsys):
    """As a line and as a file; the same line again trains nothing, another metric is refused."""
    source = Path(eventloop_sweep.__file__).parents[1]  # which isn't installed everywhere
    monkeypatch.setenv("PYTHONPATH", str(source))
    monkeypatch.setenv("OPTUNA_STORAGE", "")

    first, out = run(LINE), capsys.readouterr().out
    again, printed = run([*LINE, "--json"]), json.loads(capsys.readouterr().out)

    study = optuna.load_study(study_name="here", storage=f"sqlite:///{tiny}/here/study.db")
    assert (first, again, len(study.trials)) == (0, 0, 2)
    line = next(one for one in out.splitlines() if one.startswith("eventloop fit tiny.py"))
    assert f"--task.lr={study.best_params['task.lr']!r}" in shlex.split(line)
    assert printed["fit"] == line
    assert [one["value"] for one in printed["trials"]] == [one.value for one in study.trials]
    for one in study.trials:
        result = json.loads((tiny / "here" / f"{one.user_attrs['place']}.json").read_text())
        assert one.value == result["metrics"]["test/accuracy"]
    content = yaml.safe_load((tiny / "here" / "best.yaml").read_text())
    assert content["task"] == {"lr": study.best_params["task.lr"]}
    with pytest.raises(UsageError, match="is of test/accuracy, not of test/loss"):
        run([*LINE[:7], "--metric", "test/loss", *LINE[9:]])
