"""A run with a curriculum that was killed and resumed is one run."""

import contextlib
import os
import shutil

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from eventloop import TaskError, hookimpl
from eventloop.checkpoint.format import read, write
from eventloop.testing import differences, isolated_trainer, run_ranks, tiny_batches, tiny_task
from eventloop_curriculum import Curriculum

LAST = 16  # 8 batches of 2 samples, then 4 of 4, with a time in their middle, then 2 of 8, twice


class Dies:
    """An algorithm that kills its process in the middle of a batch, or ends the run there."""

    name = "dies"
    free_options = (
        "batch",
        "by_kill",
    )

    def __init__(self, batch=None, *, by_kill=True):
        self.batch = batch
        self.by_kill = by_kill

    @hookimpl
    def after_train_batch(self, state):
        if state.clock.batch == self.batch:
            if self.by_kill:
                os._exit(9)
            raise EOFError


def fit(folder, dies, num_workers=0, sizes=None, **given):
    """Trains 4 epochs, saving after each batch; may die."""
    inputs, targets = map(torch.cat, zip(*tiny_batches(4), strict=True))
    workers = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    task = tiny_task(
        train_dataloader=lambda: DataLoader(
            TensorDataset(inputs, targets), 2, shuffle=True, **workers
        ),
        eval_dataloaders=None,
    )
    given = {"max_duration": "4ep", "checkpoint_interval": "1ba"} | given
    plugins = [Curriculum(batch_size=sizes or {"8ba": 4, "10ba": 8}), dies]
    with isolated_trainer(folder, task, algorithms=plugins, **given) as trainer:
        trainer.fit()


def fit_and_die(folder, batch, num_workers=0):
    child = os.fork()
    if not child:
        torch.set_num_threads(1)  # a fork has none of the threads of the pool
        try:
            fit(folder, Dies(batch), num_workers)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def last(folder):
    return max((folder / "run" / "checkpoints").glob("ba*"))


@pytest.fixture(scope="module", params=[0, 2])
def in_one_go(request, tmp_path_factory):
    """Returns the number of workers, and what a run with them ends with."""
    folder = tmp_path_factory.mktemp("one-go")
    fit(folder, Dies(), request.param)
    assert last(folder).name == f"ba{LAST:08}"
    return request.param, read(last(folder)).parts


@pytest.mark.parametrize("batches", [[8], [3, 9, 11, 13]])
def test_killed_and_resumed_it_ends_with_the_same_bits(tmp_path, in_one_go, batches):
    """Before and after a change, in the middle of an epoch and between two, with workers, too."""
    num_workers, expected = in_one_go
    for batch in batches:
        fit_and_die(tmp_path, batch, num_workers)
    fit(tmp_path, Dies(), num_workers)

    assert last(tmp_path).name == f"ba{LAST:08}"
    assert list(differences(expected, read(last(tmp_path)).parts)) == []


def test_a_plugin_that_has_forgotten_has_other_batches(tmp_path):
    """Control: without its state the epoch under way would have another batch size."""
    fit_and_die(tmp_path, 10)
    folder = last(tmp_path)
    checkpoint = read(folder)
    del checkpoint.parts["plugins"]["curriculum"]
    shutil.rmtree(folder)
    write(folder, checkpoint.parts, checkpoint.facts, batch=int(folder.name[2:]))

    with pytest.raises(TaskError, match="stopped in mid-epoch with 4 samples a step"):
        fit(tmp_path, Dies())


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [(13, {"10ba": 8}), (9, {"3ba": 8, "8ba": 4, "10ba": 8})],
)
def test_resumed_with_other_times_it_goes_by_these(tmp_path, batch, sizes):
    """How many of the old ones had come says nothing about the new ones."""
    with contextlib.suppress(EOFError):
        fit(tmp_path, Dies(batch, by_kill=False))

    fit(tmp_path, Dies(), sizes=sizes)

    assert last(tmp_path).name == f"ba{LAST:08}"


def test_times_that_would_cut_the_epoch_under_way_are_refused(tmp_path):
    """Which samples are left of it, nobody could say."""
    with contextlib.suppress(EOFError):
        fit(tmp_path, Dies(9, by_kill=False))

    with pytest.raises(TaskError, match="stopped in mid-epoch with 4 samples a step"):
        fit(tmp_path, Dies(), sizes={"10ba": 4})


def test_two_ranks_go_on_in_the_middle_of_a_later_epoch(tmp_path):
    """Each with its part of the same order, in batches of the size that the epoch began with."""

    def run(folder, batch=None):
        with contextlib.suppress(EOFError):
            fit(folder, Dies(batch, by_kill=False))

    run_ranks(run, tmp_path / "one-go")
    run_ranks(run, tmp_path, 9)
    run_ranks(run, tmp_path)

    expected, actual = read(last(tmp_path / "one-go")), read(last(tmp_path))
    assert actual.facts["moment"]["batch"] == expected.facts["moment"]["batch"]
    assert list(differences(expected.parts, actual.parts)) == []
