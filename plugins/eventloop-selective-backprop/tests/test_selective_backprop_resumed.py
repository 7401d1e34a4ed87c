"""A run with selective backprop that was killed and resumed is one run."""

import os
import shutil

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from eventloop import hookimpl
from eventloop.checkpoint.compare import differences
from eventloop.checkpoint.format import read, write
from eventloop.testing import isolated_trainer, tiny_batches, tiny_task
from eventloop_selective_backprop import SelectiveBackprop

NUM_BATCHES = 10  # in two epochs


class Dies:
    """An algorithm that kills its process in the middle of a batch."""

    name = "dies"

    def __init__(self, batch=None):
        self.batch = batch

    @hookimpl
    def after_train_batch(self, state):
        if state.clock.batch == self.batch:
            os._exit(9)


def fit(folder, batch=None):
    """Trains with shuffling and microbatches, saving every second batch; may die."""
    inputs, targets = map(torch.cat, zip(*tiny_batches(5), strict=True))
    task = tiny_task(
        train_dataloader=lambda: DataLoader(TensorDataset(inputs, targets), 4, shuffle=True)
    )
    given = {"max_duration": "2ep", "microbatch_size": 3, "checkpoint_interval": "2ba"}
    given["algorithms"] = [SelectiveBackprop(keep_frac=0.25), Dies(batch)]
    with isolated_trainer(folder, task, **given) as trainer:
        trainer.fit()


def fit_and_die(folder, batch):
    child = os.fork()
    if not child:
        torch.set_num_threads(1)  # a fork has none of the threads of the pool
        try:
            fit(folder, batch)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def last(folder):
    return max((folder / "run" / "checkpoints").glob("ba*"))


@pytest.fixture(scope="module")
def in_one_go(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one-go")
    fit(folder)
    return read(last(folder)).parts


@pytest.mark.parametrize("batches", [[3], [1, 2, 5, 5, 8]])
def test_killed_and_resumed_it_ends_with_the_same_bits(tmp_path, in_one_go, batches):
    """Weights, momenta, generators: samples are drawn on, not again."""
    for batch in batches:
        fit_and_die(tmp_path, batch)
    fit(tmp_path)

    assert last(tmp_path).name == f"ba{NUM_BATCHES:08}"
    assert list(differences(in_one_go, read(last(tmp_path)).parts)) == []


def test_draws_that_begin_anew_end_elsewhere(tmp_path, in_one_go):
    """Control: without the plugin's generator the comparison fails."""
    fit_and_die(tmp_path, 5)
    folder = last(tmp_path)
    checkpoint = read(folder)
    assert checkpoint.parts["rank0"]["generators"]["named"].keys() == {"selective-backprop"}
    checkpoint.parts["rank0"]["generators"]["named"] = {}
    shutil.rmtree(folder)
    write(folder, checkpoint.parts, checkpoint.facts, batch=int(folder.name[2:]))

    fit(tmp_path)

    assert list(differences(in_one_go, read(last(tmp_path)).parts)) != []
