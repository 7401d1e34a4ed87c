"""A run that was killed and resumed stops where it would have stopped."""

import pytest

from eventloop import hookimpl
from eventloop_early_stopping import EarlyStopping
from eventloop_testing import (
    Dies,
    KilledRuns,
    fit_and_die,
    isolated_trainer,
    last_checkpoint,
    tiny_task,
)

# Both stop the run in the middle of its length: by a metric in mid-epoch, by the loss after one.
WATCHED = {
    "metric": ({"metric": "test/accuracy", "patience": "9ba"}, {"eval_interval": "2ba"}),
    "loss": ({"metric": "train/loss", "patience": "2ep", "min_delta": 0.1}, {}),
}


class DiesLater(Dies):
    """Ends its process at the end of an epoch."""

    @hookimpl
    def after_train_batch(self, state):
        pass

    @hookimpl
    def epoch_end(self, state):
        super().after_train_batch(state)


def fit(folder, batch, watched, dies=Dies):
    """Trains until it is stopped, saving every second batch; may die."""
    options, settings = WATCHED[watched]
    given = {"max_duration": "20ep", "checkpoint_interval": "2ba"} | settings
    given |= {"algorithms": [dies(batch)], "callbacks": [EarlyStopping(**options)]}
    with isolated_trainer(folder, tiny_task(), **given) as trainer:
        trainer.fit()
    return trainer


@pytest.fixture(scope="module", params=WATCHED)
def runs(request, tmp_path_factory):
    found = KilledRuns(fit, tmp_path_factory.mktemp("one-go"), request.param)
    assert 12 < found.whole.batch < 40
    assert found.whole.facts["stop_reason"].startswith("early-stopping")
    return found


@pytest.mark.sampled(9)
@pytest.mark.parametrize("batches", [[11], [1, 4, 5, 9]])
def test_killed_and_resumed_it_stops_at_the_same_batch(tmp_path, runs, batches):
    """With the bits of one in one go: best value, patience and half an epoch's loss go on."""
    assert runs.differing(tmp_path, *batches) == []


def test_a_plugin_that_has_forgotten_stops_elsewhere(tmp_path, runs):
    """Control: without its state the comparison fails."""

    def forget(parts):
        del parts["plugins"]["early_stopping"]

    assert runs.differing(tmp_path, runs.whole.batch - 1, forget=forget) != []
    assert last_checkpoint(tmp_path).batch > runs.whole.batch


# Whether that checkpoint was complete when the process died is a matter of time.
@pytest.mark.filterwarnings("ignore:nothing was trained")
def test_killed_between_the_decision_and_the_end_it_stops_at_once(tmp_path, runs):
    """The checkpoint of that batch is there; trained on, the run would be another one."""
    fit_and_die(fit, tmp_path, runs.whole.batch, *runs.args, DiesLater)

    trainer = fit(tmp_path, None, *runs.args)

    assert trainer.state.stop_reason.startswith("early-stopping")
    assert last_checkpoint(tmp_path).batch == runs.whole.batch


def test_started_again_a_run_that_was_stopped_does_nothing_and_says_so(runs):
    """A line in a shell's history mustn't train on what was found to be done."""
    with pytest.warns(UserWarning, match="nothing to train: the run was stopped .*early-stopping"):
        trainer = fit(runs.folder, None, *runs.args)

    assert trainer.state.clock.batch == runs.whole.batch
    assert last_checkpoint(runs.folder).path == runs.whole.path
