"""A run with mixup that was killed and resumed is one run."""

import pytest

from eventloop_mixup import Mixup
from eventloop_testing import Dies, KilledRuns, isolated_trainer, shuffled_batches, tiny_task


def fit(folder, batch=None):
    """Trains with shuffling and microbatches, saving every second batch; may die."""
    task = tiny_task(train_dataloader=shuffled_batches)
    given = {"max_duration": "2ep", "microbatch_size": 3, "checkpoint_interval": "2ba"}
    given["algorithms"] = [Mixup(alpha=0.4), Dies(batch)]
    with isolated_trainer(folder, task, **given) as trainer:
        trainer.fit()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return KilledRuns(fit, tmp_path_factory.mktemp("one-go"))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("batches", [[1], [3], [5], [8], [9], [1, 2, 5, 5, 7]])
def test_killed_and_resumed_it_ends_with_the_same_bits(tmp_path, runs, batches):
    """Weights, momenta, generators: permutations and shares are drawn on, not again."""
    assert runs.whole.batch == 10
    assert runs.differing(tmp_path, *batches) == []


def test_permutations_that_begin_anew_end_elsewhere(tmp_path, runs):
    """Control: without the plugin's generator the comparison fails."""

    def forget(parts):
        assert parts["rank0"]["generators"]["named"].keys() == {"mixup"}
        parts["rank0"]["generators"]["named"] = {}

    assert runs.differing(tmp_path, 5, forget=forget) != []
