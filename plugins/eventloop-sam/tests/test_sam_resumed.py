"""A run with SAM that was killed and resumed is one run."""

import os
import shutil

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from eventloop import hookimpl
from eventloop.checkpoint.compare import differences
from eventloop.checkpoint.format import read, write
from eventloop.testing import isolated_trainer, tiny_batches, tiny_task
from eventloop_sam import Sam


class Dies:
    """An algorithm that kills its process in the middle of a batch."""

    name = "dies"

    def __init__(self, batch=None):
        self.batch = batch

    @hookimpl
    def after_train_batch(self, state):
        if state.clock.batch == self.batch:
            os._exit(9)


def make_model():
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))


def fit(folder, batch=None):
    """Trains with dropout, batch norm and microbatches, saving every second batch; may die."""
    inputs, targets = map(torch.cat, zip(*tiny_batches(5), strict=True))
    task = tiny_task(
        model=make_model,
        train_dataloader=lambda: DataLoader(TensorDataset(inputs, targets), 4, shuffle=True),
    )
    given = {"max_duration": "2ep", "microbatch_size": 2, "checkpoint_interval": "2ba"}
    given["algorithms"] = [Sam(rho=0.5, every=3), Dies(batch)]
    with isolated_trainer(folder, task, **given) as trainer:
        trainer.fit()


def fit_and_die(folder, batch):
    child = os.fork()
    if not child:
        try:
            fit(folder, batch)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """A fork has none of the threads of the pool, and batch norm's last bits depend on them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def last(folder):
    return max((folder / "run" / "checkpoints").glob("ba*"))


@pytest.fixture(scope="module")
def in_one_go(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one-go")
    fit(folder)
    return read(last(folder)).parts


@pytest.mark.parametrize("batches", [[3], [8], [1, 2, 5, 5, 7]])
def test_killed_and_resumed_it_ends_with_the_same_bits(tmp_path, in_one_go, batches):
    """Which batches get a second pass is read off the clock, dropout off the generators."""
    for batch in batches:
        fit_and_die(tmp_path, batch)
    fit(tmp_path)

    assert last(tmp_path).name == "ba00000010"
    assert list(differences(in_one_go, read(last(tmp_path)).parts)) == []


def test_dropout_that_begins_anew_ends_elsewhere(tmp_path, in_one_go):
    """Control: without the generators' states the comparison fails."""
    fit_and_die(tmp_path, 5)
    folder = last(tmp_path)
    checkpoint = read(folder)
    generators = checkpoint.parts["rank0"]["generators"]["host"]
    generators["torch"] = torch.Generator().manual_seed(1).get_state()
    shutil.rmtree(folder)
    write(folder, checkpoint.parts, checkpoint.facts, batch=int(folder.name[2:]))

    fit(tmp_path)

    assert list(differences(in_one_go, read(last(tmp_path)).parts)) != []
