"""A run with averages that was killed and resumed is one run."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from eventloop import hookimpl
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
from eventloop_ema import Ema

NUM_BATCHES = 10  # in two epochs


def fit(folder, batch=None, precision="fp32"):
    """Trains with batch norm and microbatches, saving every second batch; may die."""
    inputs, targets = map(torch.cat, zip(*tiny_batches(5), strict=True))
    task = tiny_task(
        model=lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
        train_dataloader=lambda: DataLoader(TensorDataset(inputs, targets), 4, shuffle=True),
    )
    given = {"max_duration": "2ep", "microbatch_size": 2, "checkpoint_interval": "2ba"}
    given |= {"algorithms": [Ema(half_life="8sp", rampup=0.5), Dies(batch)], "precision": precision}
    with isolated_trainer(folder, task, **given) as trainer:
        trainer.fit()
        trainer.export(folder / "model.safetensors")


@pytest.fixture(scope="module", params=["fp32", "fp16"])
def in_one_go(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    fit(folder, precision=request.param)
    return request.param, folder


def test_killed_and_resumed_it_ends_with_the_same_bits(tmp_path, in_one_go):
    """Weights, averages, and what is exported."""
    precision, folder = in_one_go
    for batch in (1, 5, 8):
        fit_and_die(fit, tmp_path, batch, precision)
    fit(tmp_path, precision=precision)

    assert last_checkpoint(tmp_path).batch == NUM_BATCHES
    assert list(differences(last_checkpoint(folder).parts, last_checkpoint(tmp_path).parts)) == []
    files = [(one / "model.safetensors").read_bytes() for one in (folder, tmp_path)]
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


def test_averages_that_begin_anew_end_elsewhere(tmp_path, in_one_go):
    """Control: without the plugin's state the comparison fails."""
    precision, folder = in_one_go
    fit_and_die(fit, tmp_path, 5, precision)
    with edited_checkpoint(tmp_path) as checkpoint:
        assert len(checkpoint.parts["plugins"]["ema"]["state"]["averages"]) == 8
        checkpoint.parts["plugins"]["ema"]["state"]["averages"] = {}

    fit(tmp_path, precision=precision)

    found = list(differences(last_checkpoint(folder).parts, last_checkpoint(tmp_path).parts))
    assert any(one.path.startswith("plugins/ema/") for one in found)
