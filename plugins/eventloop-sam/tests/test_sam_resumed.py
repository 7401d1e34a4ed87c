"""A run with SAM that was killed and resumed is one run."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from eventloop.testing import (
    Dies,
    differences,
    edited_checkpoint,
    fit_and_die,
    isolated_trainer,
    last_checkpoint,
    tiny_batches,
    tiny_task,
)
from eventloop_sam import Sam


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


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """A fork has none of the threads of the pool, and batch norm's last bits depend on them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def in_one_go(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one-go")
    fit(folder)
    return last_checkpoint(folder).parts


@pytest.mark.parametrize("batches", [[3], [8], [1, 2, 5, 5, 7]])
def test_killed_and_resumed_it_ends_with_the_same_bits(tmp_path, in_one_go, batches):
    """Which batches get a second pass is read off the clock, dropout off the generators."""
    for batch in batches:
        fit_and_die(fit, tmp_path, batch)
    fit(tmp_path)

    assert last_checkpoint(tmp_path).batch == 10
    assert list(differences(in_one_go, last_checkpoint(tmp_path).parts)) == []


def test_dropout_that_begins_anew_ends_elsewhere(tmp_path, in_one_go):
    """Control: without the generators' states the comparison fails."""
    fit_and_die(fit, tmp_path, 5)
    with edited_checkpoint(tmp_path) as checkpoint:
        generators = checkpoint.parts["rank0"]["generators"]["host"]
        generators["torch"] = torch.Generator().manual_seed(1).get_state()

    fit(tmp_path)

    assert list(differences(in_one_go, last_checkpoint(tmp_path).parts)) != []
