"""A run with averages that was killed and resumed is one run."""

import pytest
from torch import nn

from eventloop import hookimpl
from eventloop_ema import Ema
from eventloop_testing import (
    Dies,
    KilledRuns,
    isolated_trainer,
    shuffled_batches,
    tiny_batches,
    tiny_task,
)


def fit(folder, batch=None, precision="fp32"):
    """Trains with batch norm and microbatches, saving every second batch; may die."""
    task = tiny_task(
        model=lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
        train_dataloader=shuffled_batches,
    )
    given = {"max_duration": "2ep", "microbatch_size": 2, "checkpoint_interval": "2ba"}
    given |= {"algorithms": [Ema(half_life="8sp", rampup=0.5), Dies(batch)], "precision": precision}
    with isolated_trainer(folder, task, **given) as trainer:
        trainer.fit()
        trainer.export(folder / "model.safetensors")


@pytest.fixture(scope="module", params=["fp32", pytest.param("fp16", marks=pytest.mark.nightly)])
def runs(request, tmp_path_factory):
    return KilledRuns(fit, tmp_path_factory.mktemp("one-go"), request.param)


def test_killed_and_resumed_it_ends_with_the_same_bits(tmp_path, runs):
    """Weights, averages, and what is exported."""
    assert runs.whole.batch == 10
    assert runs.differing(tmp_path, 1, 5, 8) == []
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


def test_an_epoch_of_a_half_life_is_the_first(tmp_path):
    """However long an epoch is by the time at which the run is resumed."""
    averages = []
    for name, ends in (("one go", ["3ep"]), ("resumed", ["2ep", "3ep"])):
        for until in ends:
            given = {"max_duration": "3ep", "checkpoint_interval": "1ep"}
            given["algorithms"] = [Ema(half_life="2ep", rampup=0), Longer()]
            with isolated_trainer(tmp_path / name, **given) as trainer:
                trainer.fit(until=until)
                file = trainer.export(tmp_path / f"{name}.safetensors")
        averages.append(file.read_bytes())

    assert averages[0] == averages[1]


def test_averages_that_begin_anew_end_elsewhere(tmp_path, runs):
    """Control: without the plugin's state the comparison fails."""

    def forget(parts):
        state = parts["plugins"]["ema"]["state"]
        assert len(state["averages"]) == 8
        state["averages"] = {}

    found = runs.differing(tmp_path, 5, forget=forget)
    assert any(one.path.startswith("plugins/ema/") for one in found)
