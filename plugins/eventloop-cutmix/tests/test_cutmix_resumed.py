"""A run with cutmix and mixup that was killed and resumed is one run."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Task
from eventloop_cutmix import Cutmix
from eventloop_mixup import Mixup
from eventloop_testing import Dies, KilledRuns, isolated_trainer


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
def runs(tmp_path_factory):
    return KilledRuns(fit, tmp_path_factory.mktemp("one-go"))


@pytest.mark.sampled(9)
@pytest.mark.parametrize("batches", [[3], [8], [1, 5, 5, 7]])
def test_killed_and_resumed_it_ends_with_the_same_bits(tmp_path, runs, batches):
    """Permutations are drawn on, rectangles and turns for the same batches."""
    assert runs.whole.batch == 10
    assert runs.differing(tmp_path, *batches) == []


def test_permutations_that_begin_anew_end_elsewhere(tmp_path, runs):
    """Control: without the plugin's generator the comparison fails."""

    def forget(parts):
        del parts["rank0"]["generators"]["named"]["cutmix"]

    assert runs.differing(tmp_path, 9, forget=forget) != []
