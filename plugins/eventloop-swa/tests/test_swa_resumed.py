"""A run with averaging that was killed and resumed is one run."""

import pytest
from torch import nn

from eventloop import hookimpl
from eventloop_swa import Swa
from eventloop_testing import (
    Dies,
    KilledRuns,
    isolated_trainer,
    shuffled_batches,
    tiny_batches,
    tiny_task,
)


def fit(folder, batch=None):
    """Trains with batch norm, dropout, shuffling and its own rate, saving often; may die."""
    task = tiny_task(
        model=lambda: nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 3)
        ),
        train_dataloader=shuffled_batches,
    )
    given = {"max_duration": "3ep", "checkpoint_interval": "2ba", "eval_interval": "3ba"}
    given["algorithms"] = [Swa(start="3ba", interval="2ba", lr=0.05), Dies(batch)]
    with isolated_trainer(folder, task, **given) as trainer:
        trainer.fit()
        trainer.export(folder / "model.safetensors")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return KilledRuns(fit, tmp_path_factory.mktemp("one-go"))


def test_killed_and_resumed_it_ends_with_the_same_bits(tmp_path, runs):
    """Weights, mean, statistics, generators, and what is exported."""
    assert runs.whole.batch == 15
    assert runs.differing(tmp_path, 1, 5, 9, 14) == []
    files = [(one / "model.safetensors").read_bytes() for one in (runs.folder, tmp_path)]
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


@pytest.mark.nightly
def test_a_mean_that_begins_anew_ends_elsewhere(tmp_path, runs):
    """Control: without the plugin's state the comparison fails."""

    def forget(parts):
        kept = parts["plugins"]["swa"]["state"]
        assert kept["num_averaged"] > 0
        kept.update(averaged={}, num_averaged=0)

    found = runs.differing(tmp_path, 9, forget=forget)
    assert any(one.path.startswith("plugins/swa/") for one in found)
