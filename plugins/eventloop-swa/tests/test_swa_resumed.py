"""A run with averaging that was killed and resumed is one run."""

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
from eventloop_swa import Swa

NUM_BATCHES = 15  # in three epochs


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
    """Trains with batch norm, dropout, shuffling and its own rate, saving often; may die."""
    inputs, targets = map(torch.cat, zip(*tiny_batches(5), strict=True))
    task = tiny_task(
        model=lambda: nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 3)
        ),
        train_dataloader=lambda: DataLoader(TensorDataset(inputs, targets), 4, shuffle=True),
    )
    given = {"max_duration": "3ep", "checkpoint_interval": "2ba", "eval_interval": "3ba"}
    given["algorithms"] = [Swa(start="3ba", interval="2ba", lr=0.05), Dies(batch)]
    with isolated_trainer(folder, task, **given) as trainer:
        trainer.fit()
        trainer.export(folder / "model.safetensors")


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
    return folder


def test_killed_and_resumed_it_ends_with_the_same_bits(tmp_path, in_one_go):
    """Weights, mean, statistics, generators, and what is exported."""
    for batch in (1, 5, 9, 14):
        fit_and_die(tmp_path, batch)
    fit(tmp_path)

    assert last(tmp_path).name == f"ba{NUM_BATCHES:08}"
    assert list(differences(read(last(in_one_go)).parts, read(last(tmp_path)).parts)) == []
    files = [(one / "model.safetensors").read_bytes() for one in (in_one_go, tmp_path)]
    assert files[0] == files[1]


class Longer:
    """Gives the second epoch more batches, as a curriculum does."""

    name = "longer"

    @hookimpl
    def should_rebuild_dataloader(self, state):
        return state.clock.epoch == 1

    @hookimpl
    def build_train_dataloader(self, state):
        return tiny_batches(8 if state.clock.epoch else 4)


def test_parts_of_an_epoch_are_those_of_the_first(tmp_path):
    """However long an epoch is by the time at which the run is resumed."""
    means = []
    for name, ends in (("one go", ["3ep"]), ("resumed", ["2ep", "3ep"])):
        for until in ends:
            given = {"max_duration": "3ep", "checkpoint_interval": "1ep"}
            given["algorithms"] = [Swa(start="1.25ep", interval="0.5ep"), Longer()]
            with isolated_trainer(tmp_path / name, **given) as trainer:
                trainer.fit(until=until)
                file = trainer.export(tmp_path / f"{name}.safetensors")
        means.append(file.read_bytes())

    assert means[0] == means[1]


def test_a_mean_that_begins_anew_ends_elsewhere(tmp_path, in_one_go):
    """Control: without the plugin's state the comparison fails."""
    fit_and_die(tmp_path, 9)
    saved = last(tmp_path)
    checkpoint = read(saved)
    kept = checkpoint.parts["plugins"]["swa"]["state"]
    assert kept["num_averaged"] > 0
    kept.update(averaged={}, num_averaged=0)
    shutil.rmtree(saved)
    write(saved, checkpoint.parts, checkpoint.facts, batch=int(saved.name[2:]))

    fit(tmp_path)

    found = list(differences(read(last(in_one_go)).parts, read(last(tmp_path)).parts))
    assert any(one.path.startswith("plugins/swa/") for one in found)
