"""Metrics: a fresh copy for each data set, in evaluation and in training."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torchmetrics import CatMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from eventloop.data.batches import Count
from eventloop.errors import TaskError
from eventloop.training.metrics import compute, fresh_metrics, predictions

STATE = SimpleNamespace(device=torch.device("cpu"))


class Seen(Metric):
    """How many samples there were; twice, under two names, if asked."""

    def __init__(self, several: bool = False):
        super().__init__()
        self.several = several
        self.add_state("count", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, outputs, targets):
        self.count += len(targets)

    def compute(self):
        return {"all": self.count, "half": self.count / 2} if self.several else self.count


class Wordy(Seen):
    def compute(self):
        return "many"


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"accuracy": MulticlassAccuracy(3)}, ["accuracy"]),
        (MulticlassAccuracy(3), ["multiclassaccuracy"]),
        (lambda: MulticlassAccuracy(3), ["multiclassaccuracy"]),
        (lambda: {"a": Seen(), "b": Seen()}, ["a", "b"]),
        (MetricCollection({"a": Seen(), "b": MulticlassAccuracy(3)}), ["a", "b"]),
        ({}, []),
    ],
)
def test_metrics_are_given_in_any_shape(given, names):
    """One, several by name, a collection, or what makes them."""
    assert list(fresh_metrics(given, STATE)) == names


def test_each_data_set_has_a_copy_with_nothing_counted():
    """Two eval sets must not add up."""
    used = Seen()
    used.update(None, [1, 2, 3])

    fresh = fresh_metrics({"seen": used}, STATE)["seen"]

    assert fresh is not used
    assert (fresh.count.item(), used.count.item()) == (0, 3)


def test_a_metric_that_returns_nothing_is_refused():
    """A `return` that was forgotten left the metric out of every table, in silence."""
    state = SimpleNamespace(device=torch.device("cpu"), current_count=lambda: Count(3, 0))
    metric = fresh_metrics({"error": lambda outputs, targets: None}, state)["error"]

    with pytest.raises(TaskError, match="metric 'error' returned None, not a tensor"):
        metric.update(torch.zeros(3), torch.zeros(3))


@pytest.mark.parametrize("outputs", [SimpleNamespace(logits="l"), {"logits": "l", "loss": 1}, "l"])
def test_metrics_receive_the_logits_where_there_are_any(outputs):
    """Models that give their own loss give an object."""
    assert predictions(outputs) == "l"


def test_a_metric_of_several_results_gets_dotted_names():
    """A collection or a report is several numbers."""
    metric = Seen(several=True)
    metric.update(None, [1, 2])

    assert compute({"n": metric}) == {"n.all": torch.tensor(2.0), "n.half": torch.tensor(1.0)}


def test_a_result_that_is_no_tensor_is_refused():
    """Loggers and tables are promised numbers."""
    metric = Wordy()
    metric.update(None, [1])

    with pytest.raises(TaskError, match="metric 'n' gave a str, not a tensor"):
        compute({"n": metric})


@pytest.fixture
def logged(make_trainer, make_task, make_plugin):
    """Trains with metrics for training; gives the numbers of a name by batch."""

    def logged(name, **given):
        heard = {}
        watch = make_plugin(
            log=lambda numbers, at: heard.update({at.batch: numbers[name]} if name in numbers
                                                 else {})
        )  # fmt: skip
        trainer = make_trainer(make_task(train_metrics={"seen": Seen()}), callbacks=[watch],
                               **{"max_duration": "2ep"} | given)  # fmt: skip
        trainer.fit()
        return heard, trainer

    return logged


def test_metrics_of_training_are_those_since_they_were_last_logged(logged):
    """At each log interval and at the end of the fit: 8 samples in two batches."""
    heard, _ = logged("train/seen", log_interval="4ba")

    assert heard == {4: 16.0, 6: 8.0}


def test_metrics_of_training_see_every_microbatch_once(logged):
    """Four of one sample are the batch."""
    heard, trainer = logged("train/seen", log_interval="1ep", microbatch_size=1)

    assert heard == {3: 12.0, 6: 12.0}
    assert trainer.state.train_metrics["seen"] == 12.0


def test_the_numbers_of_an_evaluation_have_its_moment_and_name(
    make_trainer, make_task, make_batches, make_plugin
):
    """SET/METRIC; a matrix is not a number to log, but stands in the results."""
    heard = {}
    task = make_task(
        eval_dataloaders={"valid": make_batches(2)},
        metrics={"seen": Seen(), "matrix": MulticlassConfusionMatrix(3)},
    )
    watch = make_plugin(log=lambda numbers, at: heard.update({at.batch: numbers}))
    trainer = make_trainer(task, callbacks=[watch])
    trainer.fit()

    assert {name for name in heard[3] if name.startswith("valid")} == {
        "valid/seen",
        "valid/loss",
    }
    assert heard[3]["valid/seen"] == 8.0
    assert trainer.state.eval_metrics["valid"]["matrix"].shape == (3, 3)


def test_an_evaluation_by_itself_is_delivered_at_once(
    make_trainer, make_task, make_batches, make_plugin
):
    """`eventloop eval` with a logger writes what it found."""
    heard = []
    metrics = {"seen": Seen(), "loss": None}
    task = make_task(eval_dataloaders=make_batches(1), metrics=metrics)
    watch = make_plugin(log=lambda numbers: heard.append(numbers))

    make_trainer(task, callbacks=[watch]).eval()

    assert heard == [{"eval/seen": 4.0}]


@pytest.mark.nightly
def test_where_the_task_does_not_import_torchmetrics_neither_does_the_run(run_python):
    """It takes as long to import as torch, and longer beside scipy and transformers."""
    code = """
import sys
import torch
from eventloop import Task, Trainer
batches = [(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))]
task = Task(
    model=lambda: torch.nn.Linear(3, 3),
    loss=torch.nn.functional.cross_entropy,
    train_dataloader=batches,
    eval_dataloaders=batches,
    metrics={"largest": lambda outputs, targets: outputs.max()},
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
)
settings = {"autoload": False, "device": "cpu", "max_duration": "2ep", "run_dir": "run"}
with Trainer(task, **settings) as trainer:
    trainer.fit()
assert any((trainer.state.run_dir / "checkpoints").iterdir())
print("torchmetrics" in sys.modules)
"""
    done = run_python(code)

    assert done.stdout == "False\n", done.stderr


class Texts(Metric):
    """Keeps texts, which have neither type nor device."""

    def __init__(self):
        super().__init__()
        self.add_state("texts", [], dist_reduce_fx=None)

    def update(self, outputs, targets):
        self.texts.append("a")

    def compute(self):
        return torch.tensor(len(self.texts))


def test_metrics_of_training_may_be_collected_and_keep_lists(make_trainer, make_task, tmp_path):
    """A collection has names of its own; texts are saved as they are, and what is kept has no graph."""

    class Kept(CatMetric):
        def update(self, outputs, targets):
            assert outputs.grad_fn is None
            super().update(outputs)

    metrics = {
        "all": MetricCollection({"a": MulticlassAccuracy(3), "b": Seen()}),
        "texts": Texts(),
        "kept": Kept(),
    }
    for until in ("2ba", None):
        task = make_task(train_metrics=metrics)
        settings = {"run_dir": tmp_path, "checkpoint_interval": "1ba", "max_duration": "1ep"}
        trainer = make_trainer(task, log_interval="1ep", **settings)
        trainer.fit(until=until)
        trainer.close()

    assert {"all.a", "all.b", "texts", "kept"} <= trainer.state.train_metrics.keys()
