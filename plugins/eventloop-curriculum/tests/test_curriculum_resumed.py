"""A run with a curriculum that was killed and resumed is one run."""

import contextlib

import pytest

from eventloop import TaskError
from eventloop_curriculum import Curriculum
from eventloop_testing import (
    Dies,
    KilledRuns,
    differences,
    edited_checkpoint,
    fit_and_die,
    isolated_trainer,
    last_checkpoint,
    run_ranks,
    shuffled_batches,
    tiny_task,
)

LAST = 16  # 8 batches of 2 samples, then 4 of 4, with a time in their middle, then 2 of 8, twice


def fit(folder, batch=None, num_workers=0, sizes=None, raises=None):
    """Trains 4 epochs, saving after each batch; may die, or raise."""
    workers = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    task = tiny_task(
        train_dataloader=lambda: shuffled_batches(4, 2, **workers), eval_dataloaders=None
    )
    given = {"max_duration": "4ep", "checkpoint_interval": "1ba"}
    plugins = [Curriculum(batch_size=sizes or {"8ba": 4, "10ba": 8}), Dies(batch, raises=raises)]
    with isolated_trainer(folder, task, algorithms=plugins, **given) as trainer:
        trainer.fit()


@pytest.fixture(scope="module", params=[0, 2])
def runs(request, tmp_path_factory):
    """Runs with a number of workers."""
    return KilledRuns(fit, tmp_path_factory.mktemp("one-go"), request.param)


@pytest.mark.sampled(24)
@pytest.mark.parametrize("batches", [[8], [3, 9, 11, 13]])
def test_killed_and_resumed_it_ends_with_the_same_bits(tmp_path, runs, batches):
    """Before and after a change, in the middle of an epoch and between two, with workers, too."""
    assert runs.whole.batch == LAST
    assert runs.differing(tmp_path, *batches) == []


def test_a_plugin_that_has_forgotten_has_other_batches(tmp_path):
    """Control: without its state the epoch under way would have another batch size."""
    fit_and_die(fit, tmp_path, 10)
    with edited_checkpoint(tmp_path) as checkpoint:
        del checkpoint.parts["plugins"]["curriculum"]

    with pytest.raises(TaskError, match="stopped in mid-epoch with 4 samples a step"):
        fit(tmp_path)


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [(13, {"10ba": 8}), (9, {"3ba": 8, "8ba": 4, "10ba": 8})],
)
def test_resumed_with_other_times_it_goes_by_these(tmp_path, batch, sizes):
    """How many of the old ones had come says nothing about the new ones."""
    with contextlib.suppress(EOFError):
        fit(tmp_path, batch, raises=EOFError)

    fit(tmp_path, sizes=sizes)

    assert last_checkpoint(tmp_path).batch == LAST


def test_times_that_would_cut_the_epoch_under_way_are_refused(tmp_path):
    """Which samples are left of it, nobody could say."""
    with contextlib.suppress(EOFError):
        fit(tmp_path, 9, raises=EOFError)

    with pytest.raises(TaskError, match="stopped in mid-epoch with 4 samples a step"):
        fit(tmp_path, sizes={"10ba": 4})


@pytest.mark.nightly
def test_two_ranks_go_on_in_the_middle_of_a_later_epoch(tmp_path):
    """Each with its part of the same order, in batches of the size that the epoch began with."""

    def run(folder, batch=None):
        with contextlib.suppress(EOFError):
            fit(folder, batch, raises=EOFError)

    run_ranks(run, tmp_path / "one-go")
    run_ranks(run, tmp_path, 9)
    run_ranks(run, tmp_path)

    expected, actual = last_checkpoint(tmp_path / "one-go"), last_checkpoint(tmp_path)
    assert actual.batch == expected.batch
    assert list(differences(expected.parts, actual.parts)) == []
