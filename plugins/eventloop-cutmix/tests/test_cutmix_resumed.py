"""A run with cutmix and mixup that was killed and resumed is one run."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Task
from eventloop.testing import (
    Dies,
    differences,
    edited_checkpoint,
    fit_and_die,
    isolated_trainer,
    last_checkpoint,
)
from eventloop_cutmix import Cutmix
from eventloop_mixup import Mixup


def fit(folder, batch=None):
    """Trains 10 batches with shuffling and microbatches, saving every second; may die."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(20, 1, 4, 4, generator=generator)
    dataset = TensorDataset(images, torch.randint(3, (20,), generator=generator))
    task = Task(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)),
        loss=cross_entropy,
        train_dataloader=lambda: DataLoader(dataset, 4, shuffle=True),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    )
    given = {"max_duration": "2ep", "microbatch_size": 3, "checkpoint_interval": "2ba"}
    given["algorithms"] = [Cutmix(), Mixup(), Dies(batch)]
    with isolated_trainer(folder, task, **given) as trainer:
        trainer.fit()


@pytest.fixture(scope="module")
def in_one_go(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one-go")
    fit(folder)
    return last_checkpoint(folder).parts


@pytest.mark.parametrize("batches", [[3], [8], [1, 5, 5, 7]])
def test_killed_and_resumed_it_ends_with_the_same_bits(tmp_path, in_one_go, batches):
    """Permutations are drawn on, rectangles and turns for the same batches."""
    for batch in batches:
        fit_and_die(fit, tmp_path, batch)
    fit(tmp_path)

    assert last_checkpoint(tmp_path).batch == 10
    assert list(differences(in_one_go, last_checkpoint(tmp_path).parts)) == []


def test_permutations_that_begin_anew_end_elsewhere(tmp_path, in_one_go):
    """Control: without the plugin's generator the comparison fails."""
    fit_and_die(fit, tmp_path, 9)
    with edited_checkpoint(tmp_path) as checkpoint:
        del checkpoint.parts["rank0"]["generators"]["named"]["cutmix"]

    fit(tmp_path)

    assert list(differences(in_one_go, last_checkpoint(tmp_path).parts)) != []
