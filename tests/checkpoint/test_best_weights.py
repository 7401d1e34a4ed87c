"""A test set is evaluated once, when the run is over, with the best weights that were kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from eventloop import hookimpl
from eventloop.errors import SettingError, TaskError
from eventloop_testing import run_ranks

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
    assert result.tested_with.name == "ba00000003"
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


def test_a_run_that_is_over_still_knows_the_weights(task, make_trainer):
    """Started again it does nothing, and gives the same result."""
    for settings, name in ((BEST, "ba00000003"), (BEST | {"checkpoint_best": None}, None)):
        given = settings | {"run_dir": f"run-{name}"}
        with make_trainer(task(), **given) as trainer:
            trainer.fit()
        with make_trainer(task(), **given) as trainer:
            with pytest.warns(UserWarning, match="is done"):
                result = trainer.fit()
            tested = trainer.state.manifest["tested"]

        assert result.tested_with == (name and Path(f"run-{name}/checkpoints/{name}"))
        assert (tested["checkpoint"], tested["batch"]) == (name, 9)
        assert tested["metrics"] == {"test/loss": result.metrics["test"]["loss"].item()}


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

    with pytest.raises(TaskError, match="the eval set 'test' is also the name of a test set"):
        make_trainer(make_task(**sets))


def test_eval_goes_over_all_sets(task, make_trainer):
    """Asked for, it is given."""
    assert list(make_trainer(task()).eval()) == ["valid", "test"]


@pytest.mark.parametrize("settings", [{}, {"checkpoint_best": None}])
def test_two_ranks_evaluate_it_as_one_process_does(make_task, make_batches, make_trainer, settings):
    """Each its part of the set, both with the weights that rank 0 has kept; the last ones go on."""
    sets = {
        "train_dataloader": make_batches(4, 2),
        "eval_dataloaders": {"valid": make_batches(4, 2)},
        "test_dataloaders": make_batches(6, 2),
    }

    def train(folder, batch_size):
        given = sets | {"train_dataloader": make_batches(8 // batch_size, batch_size)}
        values = BEST | {"run_dir": folder} | settings
        with make_trainer(make_task(**given), **values) as trainer:
            result = trainer.fit()
            weights = {name: one.clone() for name, one in result.model.state_dict().items()}
            told = json.loads(Path(folder, "manifest.json").read_text())
            assert told["tested"] == trainer.state.manifest["tested"]
            assert told["tested"]["metrics"] == {"test/loss": result.history[-1]["test/loss"]}
            return result.metrics, result.history, weights

    one = train("one", 4)
    ranks = run_ranks(train, "two", 2)

    for metrics, history, weights in ranks:
        for name in ("valid", "test"):
            torch.testing.assert_close(metrics[name], one[0][name], rtol=1e-5, atol=0)
        torch.testing.assert_close(weights, one[2], rtol=0, atol=1e-6)
        assert history[-1]["test/loss"] == ranks[0][1][-1]["test/loss"]
    kept, first = one[1][-1]["test/loss"], one[1][0]["valid/loss"]
    assert (abs(kept - first) < abs(kept - one[1][-1]["valid/loss"])) == (not settings)


def test_a_best_checkpoint_that_is_gone_is_said(task, make_trainer, make_plugin):
    """The number is that of other weights than it is taken for."""

    def remove(state):
        if state.clock.epoch == 3:
            shutil.rmtree("run/checkpoints/ba00000003")

    with make_trainer(task(), callbacks=[make_plugin("z", epoch_end=remove)], **BEST) as trainer:
        with pytest.warns(
            UserWarning, match="the last weights are used: ba00000003, .*isn't among"
        ):
            result = trainer.fit()

    assert result.metrics["test"]["loss"] == result.metrics["valid"]["loss"]
    assert result.tested_with is None


class Counting(torch.nn.Linear):
    """A layer with a state of its own, which is no tensor."""

    def __init__(self):
        super().__init__(3, 3)
        self.num_calls = 0

    def forward(self, inputs):
        self.num_calls += self.training
        return super().forward(inputs)

    def get_extra_state(self):
        return {"num_calls": self.num_calls}

    def set_extra_state(self, state):
        self.num_calls = state["num_calls"]


def test_what_a_model_keeps_beside_tensors_is_lent_and_given_back(task, make_trainer):
    """It belongs to the weights, and isn't one."""
    seen = []

    class Watch:
        name = "z"

        @hookimpl
        def eval_start(self, state):
            seen.append((state.eval_name, state.model.num_calls))

    with make_trainer(task(model=Counting), callbacks=[Watch()], **BEST) as trainer:
        model = trainer.fit().model

    assert seen == [("valid", 3), ("valid", 6), ("valid", 9), ("test", 3)]
    assert model.num_calls == 9
