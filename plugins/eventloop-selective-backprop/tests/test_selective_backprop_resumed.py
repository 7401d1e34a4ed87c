"""A run with selective backprop that was killed and resumed is one run."""

import pytest
import torch
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
from eventloop_selective_backprop import SelectiveBackprop

NUM_BATCHES = 10  # in two epochs


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


@pytest.fixture(scope="module")
def in_one_go(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one-go")
    fit(folder)
    return last_checkpoint(folder).parts


@pytest.mark.parametrize("batches", [[3], [1, 2, 5, 5, 8]])
def test_killed_and_resumed_it_ends_with_the_same_bits(tmp_path, in_one_go, batches):
    """Weights, momenta, generators: samples are drawn on, not again."""
    for batch in batches:
        fit_and_die(fit, tmp_path, batch)
    fit(tmp_path)

    assert last_checkpoint(tmp_path).batch == NUM_BATCHES
    assert list(differences(in_one_go, last_checkpoint(tmp_path).parts)) == []


def test_draws_that_begin_anew_end_elsewhere(tmp_path, in_one_go):
    """Control: without the plugin's generator the comparison fails."""
    fit_and_die(fit, tmp_path, 5)
    with edited_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.parts["rank0"]["generators"]["named"].keys() == {"selective-backprop"}
        checkpoint.parts["rank0"]["generators"]["named"] = {}

    fit(tmp_path)

    assert list(differences(in_one_go, last_checkpoint(tmp_path).parts)) != []
