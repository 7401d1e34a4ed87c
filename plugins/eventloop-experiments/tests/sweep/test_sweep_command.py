"""`eventloop sweep` in one process; `test_sweep.py` has several, and kills."""

import json
import os
import shlex
from pathlib import Path

import optuna
import pytest
import yaml

import eventloop_experiments
from eventloop import PluginError
from eventloop.commands import UsageError
from eventloop_experiments.sweep import run

LINE = ["tiny.py", "--task.lr", "log:1e-3:1.0", "--clip-norm", "none,1.0", "--trials", "2",
        "--metric", "test/loss", "--run-dir", "here", "--jobs", "2", "--no-plugins"]  # fmt: skip


@pytest.mark.nightly
def test_a_sweep_trains_and_says_what_was_best(tiny, tiny_text, monkeypatch, capsys):
    """As a line and as a file; the same line again trains nothing, another metric is refused."""
    # Without metrics, for which each process would import torchmetrics.
    lines = [one for one in tiny_text.splitlines() if "MulticlassAccuracy" not in one]
    (tiny / "tiny.py").write_text("\n".join(lines))
    source = Path(eventloop_experiments.__file__).parents[1]  # which isn't installed everywhere
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
        assert one.value == result["metrics"]["test/loss"]
    content = yaml.safe_load((tiny / "here" / "best.yaml").read_text())
    assert content["task"] == {"lr": study.best_params["task.lr"]}
    with pytest.raises(UsageError, match="is of test/loss, not of train/loss"):
        run([*LINE[:7], "--metric", "train/loss", *LINE[9:]])


PLUGIN = """
from eventloop import hookimpl


class Plugin:
    @hookimpl
    def unsuitable(self, state):
        return {reason!r}

    @hookimpl
    def fit_start(self, state):
        pass
"""


@pytest.mark.nightly
def test_a_choice_of_plugins_that_does_not_suit_the_task_is_refused_before_any_trial(
    tiny, monkeypatch, capsys
):
    """The sampler may come to it after hours; the first choice trains."""
    source = Path(eventloop_experiments.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{source}{os.pathsep}{tiny}")
    monkeypatch.setenv("OPTUNA_STORAGE", "")
    for name, reason in (("easy", None), ("picky", "it needs images")):
        (tiny / f"{name}_module.py").write_text(PLUGIN.format(reason=reason))
        info = tiny / f"eventloop_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: eventloop-{name}\nVersion: 1.0\n"
        )
        (info / "entry_points.txt").write_text(
            f"[eventloop.algorithms]\n{name} = {name}_module:Plugin\n"
        )

    with pytest.raises(PluginError) as caught:
        run(["tiny.py", "-p", "easy,picky", *LINE[1:3], *LINE[5:]])

    message = str(caught.value)
    assert message.startswith("1 problem in 1 row; nothing was trained")
    assert "-p picky: PluginError: picky was asked for" in message
    assert "it needs images" in message
    assert [*tiny.glob("here/trial-*")] == []
    assert " batches in " not in capsys.readouterr().out


SETS = """
import torch
from eventloop import Task


def task(lr: float = 0.1):
    batches = [(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))]
    return Task(
        model=torch.nn.Linear(3, 3),
        loss=torch.nn.functional.cross_entropy,
        train_dataloader=batches,
        eval_dataloaders={"valid": batches},
        test_dataloaders={"test": batches},
        # Away from the minimum, so that the best evaluation is the first.
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr, maximize=True),
        settings={"max_duration": "3ep", "device": "cpu"},
    )
"""


def test_the_best_evaluation_of_a_metric_that_no_test_set_has_is_found(tiny, monkeypatch, capsys):
    """Without `--metric`, by the eval set alone; again with another objective is another sweep."""
    (tiny / "sets.py").write_text(SETS)
    monkeypatch.setenv("PYTHONPATH", str(Path(eventloop_experiments.__file__).parents[1]))
    line = ["sets.py", "--task.lr", "0.1,0.2", "--trials", "1", "--run-dir", "here", "--pruner",
            "none", "--no-plugins", "--json", "--objective", "best"]  # fmt: skip

    status = run(line)

    content = json.loads(capsys.readouterr().out)
    (trial,) = content["trials"]
    result = json.loads(next((tiny / "here").glob("trial-*.json")).read_text())
    assert (status, content["metric"], content["direction"]) == (0, "valid/loss", "minimize")
    assert trial["value"] == result["extremes"]["valid/loss"]["min"]
    assert trial["value"] < result["metrics"]["valid/loss"]
    assert result["test_sets"] == ["test"]
    with pytest.raises(UsageError, match="of the best evaluation of each trial, not of the last"):
        run(line[:-2])


def test_an_objective_that_is_neither_is_refused(tiny):
    """With the closest."""
    with pytest.raises(UsageError, match=r"'bst' is neither last nor best; the closest is 'best'"):
        run([*LINE, "--objective", "bst"])


@pytest.mark.nightly
def test_a_constructor_runs_once_in_each_trial(tiny, tiny_text, monkeypatch, capfd):
    """Once in each process that trains; the sweep itself builds no plugin."""
    lines = [line for line in tiny_text.splitlines() if "MulticlassAccuracy" not in line]
    (tiny / "tiny.py").write_text("\n".join(lines))
    (tiny / "watch.py").write_text(
        "import os\nfrom pathlib import Path\nfrom eventloop import hookimpl\n"
        "class Watch:\n"
        "    def __init__(self):\n"
        "        with Path('built').open('a') as file:\n"
        "            file.write(f'{os.getpid()}\\n')\n"
        "    @hookimpl\n"
        "    def epoch_end(self): ...\n"
    )
    source = Path(eventloop_experiments.__file__).parents[1]  # which isn't installed everywhere
    monkeypatch.setenv("PYTHONPATH", str(source))
    monkeypatch.setenv("OPTUNA_STORAGE", "")

    status = run([*LINE, "-p", "watch.py:Watch"])

    assert status == 0, capfd.readouterr().err
    processes = (tiny / "built").read_text().splitlines()
    assert len(processes) == len({*processes}) == 3  # the dry run and two trials
    assert str(os.getpid()) not in processes
