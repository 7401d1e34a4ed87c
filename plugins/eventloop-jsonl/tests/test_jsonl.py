"""The plugin in a training."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torchmetrics import MeanMetric

from eventloop import PluginError, Task, Trainer, hookimpl
from eventloop_jsonl import Jsonl


class Mean(MeanMetric):
    def update(self, outputs, targets):
        super().update(outputs)


def tiny_task():
    batch = torch.ones(4, 2), torch.zeros(4, 1)
    return Task(
        model=torch.nn.Linear(2, 1),
        loss=torch.nn.functional.mse_loss,
        train_dataloader=[batch] * 3,
        eval_dataloaders={"test": [batch]},
        metrics={"mean": Mean()},
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )


def fit(*callbacks, algorithms=(), **settings):
    settings = {"max_duration": "4ep", "autoload": False, "device": "cpu"} | settings
    with Trainer(tiny_task(), callbacks=callbacks, algorithms=algorithms, **settings) as trainer:
        trainer.fit()


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_number_of_a_run_is_a_line(tmp_path):
    """12 batches log a loss and a learning rate, 4 evaluations one metric and the loss."""
    fit(Jsonl(), run_dir=tmp_path / "run", log_interval="5ba")

    found = rows(tmp_path / "run" / "metrics.jsonl")

    assert Counter(row["name"] for row in found) == {
        "train/loss": 12,
        "lr/sgd": 12,
        "test/mean": 4,
        "test/loss": 4,
    }
    losses = [row for row in found if row["name"] == "train/loss"]
    assert [row["batch"] for row in losses] == list(range(1, 13))
    assert [row["epoch"] for row in losses] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert losses[-1]["sample"] == 48


def test_the_values_are_those_that_were_logged(tmp_path):
    """A float must come back bit for bit, whatever it is."""
    values = iter([0.1, float("nan"), float("inf"), -1e-300])

    class Logs:
        @hookimpl
        def epoch_start(self, state):
            state.log("own/value", next(values))

    fit(Jsonl(), Logs(), run_dir=tmp_path)

    found = [row["value"] for row in rows(tmp_path / "metrics.jsonl") if "own" in row["name"]]
    assert found == [0.1, "NaN", "Infinity", -1e-300]


def test_runs_may_share_a_file(tmp_path):
    """Each line of a file that was named says which run it is of."""
    path = tmp_path / "all.jsonl"

    for name in ("one", "two"):
        fit(Jsonl(path=path), run_dir=tmp_path / name)

    assert [row["run"] for row in rows(path)] == 32 * [f"{tmp_path}/one"] + 32 * [f"{tmp_path}/two"]


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_starts_where_the_process_started(kind, tmp_path, monkeypatch):
    """A task that changes the working directory must not split the file."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    class Moves:
        @hookimpl
        def epoch_end(self, state):
            monkeypatch.chdir(tmp_path / "elsewhere")

    fit(Jsonl(path=kind("numbers.jsonl")), algorithms=[Moves()], log_interval="1ba")

    assert len(rows(tmp_path / "numbers.jsonl")) == 32
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_trainer_that_logs_nothing_writes_nothing(tmp_path):
    """Looking at a model makes no folders."""
    Trainer(
        tiny_task(), callbacks=[Jsonl()], run_dir=tmp_path / "run", autoload=False, device="cpu"
    ).close()

    assert not (tmp_path / "run").exists()


FULL_DISK = [path for path in ("/dev/full",) if Path(path).exists()]  # Linux has one


@pytest.mark.parametrize("path", [*FULL_DISK, "{tmp}/file/metrics.jsonl", "{tmp}"])
def test_a_path_that_takes_no_lines_is_named(tmp_path, path):
    """A full disk, a file in the place of a folder, a folder in the place of the file."""
    (tmp_path / "file").touch()
    path = Path(path.format(tmp=tmp_path))

    with pytest.raises(PluginError, match="can't be written") as raised:
        fit(Jsonl(path=path))

    assert str(path) in str(raised.value)
    assert "Jsonl(path=" in str(raised.value)
