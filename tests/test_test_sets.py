"""A test set is evaluated once, when the run is over, with the best weights that were kept."""

from __future__ import annotations

import pytest
import torch

from eventloop import hookimpl
from eventloop.errors import SettingError, TaskError

# The loss falls, so that the highest is that of the first evaluation.
BEST = {"checkpoint_best": "max valid/loss", "run_dir": "run", "max_duration": "3ep"}


@pytest.fixture
def task(make_task, make_batches):
    """Makes a task with a set to choose by and a set to report."""
    return lambda **given: make_task(
        eval_dataloaders={"valid": make_batches()}, test_dataloaders=make_batches(), **given
    )


def test_a_test_set_is_evaluated_once_at_the_end(task, make_trainer, make_plugin):
    """Whatever is chosen by looking at it each epoch is chosen for it."""
    seen = []
    watch = make_plugin(
        "z", eval_start=lambda state: seen.append((state.clock.batch, state.eval_name))
    )

    result = make_trainer(task(), callbacks=[watch], max_duration="2ep").fit()

    assert seen == [(3, "valid"), (6, "valid"), (6, "test")]
    assert "test/loss" in result.history[-1]
    assert result.metrics["test"].keys() == {"loss"}
    assert result.metrics["test"]["loss"] == result.metrics["valid"]["loss"]


def test_it_has_the_best_weights_and_the_run_ends_with_the_last(task, make_trainer):
    """What was kept for the best evaluation is what one would use."""
    with make_trainer(task(), **BEST) as trainer:
        result = trainer.fit()
        last = {name: one.clone() for name, one in trainer.state.model.state_dict().items()}
    with make_trainer(task(), max_duration="3ep") as plain:
        plain.fit()

    first = result.history[0]["valid/loss"]
    assert result.metrics["test"]["loss"].item() == pytest.approx(first, abs=0)
    assert result.metrics["valid"]["loss"].item() < first
    torch.testing.assert_close(last, dict(plain.state.model.state_dict()), rtol=0, atol=0)


def test_killed_before_its_end_a_run_evaluates_it_then(task, make_trainer):
    """The last checkpoint before says that the run isn't over."""

    class Dies:
        name = "dies"

        @hookimpl
        def eval_start(self, state):
            if state.eval_name == "test":
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), make_trainer(task(), callbacks=[Dies()], **BEST) as one:
        one.fit()
    with make_trainer(task(), **BEST) as trainer:
        result = trainer.fit()

    assert result.metrics["test"]["loss"].item() == result.history[0]["valid/loss"]


def test_a_part_of_a_run_does_not_evaluate_it(task, make_trainer):
    """It isn't over: more is to come."""
    trainer = make_trainer(task(), max_duration="2ep")

    assert "test" not in trainer.fit(until="1ep").metrics
    assert "test" in trainer.fit().metrics


def test_nothing_is_chosen_by_a_test_set(task, make_trainer):
    """Its number would be too good."""
    with pytest.raises(SettingError, match=r"no metric is named 'test/loss'.*\n.*valid/loss"):
        make_trainer(task(), checkpoint_best="test/loss", run_dir="run")


def test_a_set_is_one_or_the_other(make_task, make_batches, make_trainer):
    """Two sets of a name would have one number."""
    sets = {"eval_dataloaders": {"test": make_batches()}, "test_dataloaders": make_batches()}

    with pytest.raises(TaskError, match="the eval set 'test' is a test set, too"):
        make_trainer(make_task(**sets))


def test_eval_goes_over_all_sets(task, make_trainer):
    """Asked for, it is given."""
    assert list(make_trainer(task()).eval()) == ["valid", "test"]
