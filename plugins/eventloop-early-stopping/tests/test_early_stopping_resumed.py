"""A run that was killed and resumed stops where it would have stopped."""

import os
import shutil

import pytest
import torch

from eventloop import hookimpl
from eventloop.checkpoint.format import read, write
from eventloop.testing import differences, isolated_trainer, tiny_task
from eventloop_early_stopping import EarlyStopping

# Both stop the run in the middle of its length: by a metric in mid-epoch, by the loss after one.
WATCHED = {
    "metric": ({"metric": "eval/test/accuracy", "patience": "9ba"}, {"eval_interval": "2ba"}),
    "loss": ({"metric": "train/loss", "patience": "2ep", "min_delta": 0.1}, {}),
}


class Dies:
    """An algorithm that kills its process at an event of a batch."""

    name = "dies"
    free_options = (
        "batch",
        "event",
    )

    def __init__(self, batch=None, event="after_train_batch"):
        self.at = batch, event

    @hookimpl
    def after_train_batch(self, state):
        self.at == (state.clock.batch, "after_train_batch") and os._exit(9)

    @hookimpl
    def epoch_end(self, state):
        self.at == (state.clock.batch, "epoch_end") and os._exit(9)


def fit(folder, watched, *dies):
    """Trains until it is stopped, saving every second batch; may die."""
    options, settings = WATCHED[watched]
    given = {"max_duration": "20ep", "checkpoint_interval": "2ba"} | settings
    with isolated_trainer(
        folder,
        tiny_task(),
        algorithms=[Dies(*dies)],
        callbacks=[EarlyStopping(**options)],
        **given,
    ) as trainer:
        trainer.fit()
    return trainer


def fit_and_die(folder, watched, *dies):
    child = os.fork()
    if not child:
        torch.set_num_threads(1)  # a fork has none of the threads of the pool
        try:
            fit(folder, watched, *dies)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def last(folder):
    return max((folder / "run" / "checkpoints").glob("ba*"))


@pytest.fixture(scope="module", params=WATCHED)
def in_one_go(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one-go")
    trainer = fit(folder, request.param)
    assert 12 < trainer.state.clock.batch < 40
    assert trainer.state.stop_reason.startswith("early-stopping")
    return request.param, last(folder)


@pytest.mark.parametrize("batches", [[11], [1, 4, 5, 9]])
def test_killed_and_resumed_it_stops_at_the_same_batch(tmp_path, in_one_go, batches):
    """With the bits of one in one go: best value, patience and half an epoch's loss go on."""
    watched, expected = in_one_go
    for batch in batches:
        fit_and_die(tmp_path, watched, batch)

    fit(tmp_path, watched)

    assert last(tmp_path).name == expected.name
    assert list(differences(read(expected).parts, read(last(tmp_path)).parts)) == []


def test_a_plugin_that_has_forgotten_stops_elsewhere(tmp_path, in_one_go):
    """Control: without its state the comparison fails."""
    watched, expected = in_one_go
    fit_and_die(tmp_path, watched, int(expected.name[2:]) - 1)
    folder = last(tmp_path)
    checkpoint = read(folder)
    del checkpoint.parts["rank0"]["plugins"]["early_stopping"]
    shutil.rmtree(folder)
    write(folder, checkpoint.parts, checkpoint.facts, batch=int(folder.name[2:]))

    fit(tmp_path, watched)

    assert last(tmp_path).name > expected.name


def test_killed_between_the_decision_and_the_end_it_stops_at_once(tmp_path, in_one_go):
    """The checkpoint of that batch is there; trained on, the run would be another one."""
    watched, expected = in_one_go
    fit_and_die(tmp_path, watched, int(expected.name[2:]), "epoch_end")

    trainer = fit(tmp_path, watched)

    assert trainer.state.stop_reason.startswith("early-stopping")
    assert last(tmp_path).name == expected.name


def test_started_again_a_run_that_was_stopped_does_nothing_and_says_so(in_one_go):
    """A line in a shell's history mustn't train on what was found to be done."""
    watched, expected = in_one_go
    folder = expected.parents[2]

    with pytest.warns(UserWarning, match="nothing to train: the run was stopped .*early-stopping"):
        trainer = fit(folder, watched)

    assert trainer.state.clock.batch == int(expected.name[2:])
    assert last(folder) == expected
