"""The result of a fit: metrics, history and folder, and what a notebook shows."""

from __future__ import annotations

from torchmetrics.classification import MulticlassAccuracy

from eventloop import hookimpl
from eventloop_testing import tiny_task


def test_fit_gives_metrics_history_and_folder(make_trainer, make_task, make_batches, clean):
    """What a script prints or plots."""
    task = make_task(
        eval_dataloaders={"valid": make_batches(2), "test": make_batches(1)},
        metrics={"accuracy": MulticlassAccuracy(3)},
    )
    result = make_trainer(task, max_duration="2ep", run_dir=clean / "here").fit()

    names = ["valid/accuracy", "test/accuracy"]
    assert {name: list(found) for name, found in result.metrics.items()} == {
        "valid": ["accuracy", "loss"], "test": ["accuracy", "loss"]
    }  # fmt: skip
    assert [(row["epoch"], row["batch"]) for row in result.history] == [(1, 3), (2, 6)]
    assert all(set(names) | {"train/loss"} <= row.keys() for row in result.history)
    assert result.history[-1][names[0]] == result.metrics["valid"]["accuracy"].item()
    assert result.run_dir == clean / "here"


def test_the_end_of_a_fit_without_evaluation_stands_in_the_history(make_trainer):
    """A row for each evaluation, and for the end of each fit."""
    trainer = make_trainer()

    trainer.fit(until="1ba")
    history = trainer.fit().history

    assert [row["batch"] for row in history] == [1, 3]
    assert all(isinstance(row["train/loss"], float) for row in history)


class Named:
    """A callback with an option."""

    def __init__(self, *, by_name) -> None:
        self.by_name = dict(by_name)

    @hookimpl
    def batch_end(self, state):
        pass


def test_a_result_is_curves_in_a_notebook(make_trainer):
    """One for each number, as its history has it; names are text, not HTML."""
    result = make_trainer(tiny_task(), max_duration="3ep").fit()
    result.history[-1]["<b>"] = float("nan")

    html = result._repr_html_()

    names = {name for row in result.history for name in row} - {
        "epoch",
        "batch",
        "sample",
        "token",
        "seconds",
    }
    assert html.count("<polyline") == len(names) >= 2
    assert f"train/loss <b>{result.history[-1]['train/loss']:.4g}</b>" in html
    assert "&lt;b&gt; <b>nan</b>" in html


def test_a_trainer_is_the_table_of_its_plugins_in_a_notebook(make_trainer):
    """Those that take part in order, then those that don't, with the reason; all of it is text."""
    trainer = make_trainer(tiny_task(), callbacks=[Named(by_name={"<b>": 1})])

    html = trainer._repr_html_()

    rows = [row.partition("</tr>")[0] for row in html.split("<tr")[2:]]
    assert len(rows) == len(trainer.plugins) + len(trainer.off) > 2
    assert [one.name in row for one, row in zip(trainer.plugins, rows, strict=False)].count(
        False
    ) == 0
    assert "by_name={&#x27;&lt;b&gt;&#x27;: 1}" in html
    assert "<b>" not in html
    for one, row in zip(trainer.off, rows[len(trainer.plugins) :], strict=True):
        assert one.found.name in row
        assert f"off: {one.reason}" in row
