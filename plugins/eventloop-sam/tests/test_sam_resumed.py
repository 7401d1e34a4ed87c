"""A run with SAM that was killed and resumed is one run."""

import pytest
import torch
from torch import nn

from eventloop_sam import Sam
from eventloop_testing import Dies, KilledRuns, isolated_trainer, shuffled_batches, tiny_task


def make_model():
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))


def fit(folder, batch=None):
    """Trains with dropout, batch norm and microbatches, saving every second batch; may die."""
    task = tiny_task(model=make_model, train_dataloader=shuffled_batches)
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
def runs(tmp_path_factory):
    return KilledRuns(fit, tmp_path_factory.mktemp("one-go"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("batches", [[3], [8], [1, 2, 5, 5, 7]])
def test_killed_and_resumed_it_ends_with_the_same_bits(tmp_path, runs, batches):
    """Which batches get a second pass is read off the clock, dropout off the generators."""
    assert runs.whole.batch == 10
    assert runs.differing(tmp_path, *batches) == []


def test_dropout_that_begins_anew_ends_elsewhere(tmp_path, runs):
    """Control: without the generators' states the comparison fails."""

    def forget(parts):
        parts["rank0"]["generators"]["host"]["torch"] = torch.Generator().manual_seed(1).get_state()

    assert runs.differing(tmp_path, 5, forget=forget) != []
