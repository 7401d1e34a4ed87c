"""Which metric runs are compared by, where none is named."""

from __future__ import annotations

import pytest

from eventloop.commands import UsageError
from eventloop_experiments.runs import Metric, choose_metric

KNOWN = {
    "train/loss": False,
    "valid/loss": False,
    "valid/accuracy": True,
    "test/loss": False,
    "test/accuracy": True,
}


def test_nothing_is_chosen_by_a_test_set():
    """What is chosen by a test set looks better there than it is."""
    assert choose_metric(None, KNOWN, test_sets=["test"]) == Metric("valid/accuracy", True)
    assert choose_metric("test/accuracy", KNOWN, test_sets=["test"]).name == "test/accuracy"


def test_the_loss_is_chosen_where_an_eval_set_has_nothing_else():
    """Of the sets that aren't test sets; test sets may have metrics."""
    known = {"valid/loss": False, "test/accuracy": True}

    assert choose_metric(None, known, test_sets=["test"]) == Metric("valid/loss", False)


def test_where_there_are_test_sets_alone_one_has_to_be_named():
    """They aren't chosen by, unless someone says so."""
    with pytest.raises(UsageError, match="no metric except on test sets, test") as caught:
        choose_metric(None, {"test/accuracy": True, "train/loss": False}, test_sets=["test"])

    assert caught.value.fix == "write `--metric test/accuracy`"


@pytest.mark.parametrize(
    ("setting", "metric"),
    [
        ("valid/loss", Metric("valid/loss", False)),
        ("max valid/loss", Metric("valid/loss", True)),
        ("min test/accuracy", Metric("test/accuracy", False)),
    ],
)
def test_the_metric_of_checkpoint_best_comes_before_the_only_one(setting, metric):
    """The user has said already what the best is."""
    assert choose_metric(None, KNOWN, test_sets=["test"], checkpoint_best=setting) == metric


def test_what_is_named_comes_before_checkpoint_best():
    """The command line is stronger."""
    assert choose_metric("valid/loss", KNOWN, checkpoint_best="valid/accuracy").name == "valid/loss"


def test_a_metric_without_a_direction_is_shown_with_both():
    """Else the line to paste is refused in its turn."""
    known = {"valid/accuracy": True, "valid/size": None}

    with pytest.raises(UsageError) as caught:
        choose_metric(None, known)

    assert caught.value.fix == (
        'write `--metric valid/accuracy` or `--metric "max valid/size"` or `--metric "min valid/size"`'
    )
