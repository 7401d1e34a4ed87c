"""Averages on several ranks."""

import os

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Allowed
from eventloop.toolbox import flatten, gathered, read_checkpoint
from eventloop_ema import Ema
from eventloop_fsdp import Fsdp
from eventloop_testing import isolated_trainer, run_ranks, tiny_batches, tiny_task

X, Y = map(torch.cat, zip(*tiny_batches(6, 8), strict=True))


def fit(folder, batch_size, *plugins, stop=None, **settings):
    """Trains 3 epochs; gives the exported weights by name, and what the checkpoints keep."""
    task = tiny_task(train_dataloader=DataLoader(TensorDataset(X, Y), batch_size))
    given = {"algorithms": [Ema(decay=0.8, rampup=0), *plugins], "max_duration": "3ep"}
    with isolated_trainer(folder, task, **given | settings) as trainer:
        trainer.fit(stop)
        path = trainer.export(folder / "model.safetensors")
        state = trainer.state
        kept = state.plugin("ema").state_dict()["averages"]
        kept = {
            name: one.cpu() for name, one in gathered(kept, state.all_gather, keep=True).items()
        }
    return load_file(path) if trainer.state.rank == 0 else kept, kept


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("alone"), 16)[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", [(), (Fsdp,)], ids=["ddp", "fsdp"])
def test_two_ranks_have_the_averages_of_one(tmp_path, alone, strategy):
    """Copies or shards of the weights: what is saved and exported is whole."""

    def train():
        plugins = [one() for one in strategy]
        fit(tmp_path, 8, *plugins, stop="2ep", checkpoint_interval="4ba")
        return fit(tmp_path, 8, *[one() for one in strategy], checkpoint_interval="4ba")

    (actual, kept), (_, kept_by_other) = run_ranks(train)

    assert actual.keys() == alone.keys() == kept.keys()
    for name, value in alone.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=1e-6)
        torch.testing.assert_close(kept[name], value, rtol=0, atol=1e-6)
        assert torch.equal(kept_by_other[name], kept[name])
    assert not torch.allclose(
        fit(tmp_path / "other", 8)[0]["0.weight"], alone["0.weight"], atol=1e-3
    )


@pytest.mark.nightly
@pytest.mark.parametrize("replicate", [1, 2])
def test_shards_of_the_averages_are_those_of_any_number_of_ranks(tmp_path, alone, replicate):
    """Four ranks, then two, one, and two again: each writes and reads its own, none has the whole."""

    def train(until, *strategy):
        batch_size = 16 // int(os.environ.get("WORLD_SIZE", "1"))
        allowed = Allowed(config_change=True, missing_plugin=("fsdp",))
        given = {"stop": until, "checkpoint_interval": "1ba", "allowed": allowed}
        return fit(tmp_path, batch_size, *strategy, **given)

    (_, slices), *_ = run_ranks(train, "2ba", Fsdp(replicate=replicate), world_size=4)
    saved = max((tmp_path / "run" / "checkpoints").iterdir())
    assert [path.name for path in sorted(saved.glob("plugins*.safetensors"))] == [
        f"plugins-0000{rank}.safetensors" for rank in range(4)
    ]
    tensors, _ = flatten(read_checkpoint(saved, ["plugins"]).parts, "")
    assert slices.keys() == {name.rpartition("averages.")[2] for name in tensors}
    run_ranks(train, "4ba", Fsdp())
    train("6ba")
    (actual, _), _ = run_ranks(train, None, Fsdp())

    for name, value in alone.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=1e-6)


@pytest.mark.nightly
def test_the_best_averages_are_lent_to_the_test_set_by_each_rank(tmp_path):
    """Those of the first evaluation, since the highest loss is wanted; afterwards it has its own again."""

    def train():
        task = tiny_task(
            train_dataloader=DataLoader(TensorDataset(X, Y), 4),
            eval_dataloaders={"valid": tiny_batches(2, 8)},
            test_dataloaders=tiny_batches(2, 8),
        )
        given = {"checkpoint_best": "max valid/loss", "max_duration": "3ep"}
        plugins = [Ema(decay=0.8, rampup=0), Fsdp(replicate=2)]
        with isolated_trainer(tmp_path, task, algorithms=plugins, **given) as trainer:
            result = trainer.fit()
            return result.history, result.metrics, trainer.eval()["valid"]["loss"]

    for history, metrics, afterwards in run_ranks(train, world_size=4):
        assert abs(metrics["test"]["loss"] - history[0]["valid/loss"]) < 1e-6
        assert abs(afterwards - metrics["valid"]["loss"]) < 1e-6
        assert metrics["valid"]["loss"] < history[0]["valid/loss"] - 1e-4


def test_all_ranks_evaluate_with_the_statistics_of_the_first(tmp_path):
    """Each saw other samples; a data set that is shared out must be measured with one model."""

    def train():
        task = tiny_task(
            model=lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
            train_dataloader=DataLoader(TensorDataset(X, Y), 8),
        )
        with isolated_trainer(tmp_path, task, algorithms=[Ema(decay=0.8, rampup=0)]) as trainer:
            trainer.fit()
            return trainer.eval()["test"], trainer.export(tmp_path / "model.safetensors")

    (first, path), (second, _) = run_ranks(train)
    with isolated_trainer(
        tmp_path / "alone",
        tiny_task(
            model=lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
        ),
    ) as trainer:
        trainer.load_weights(path)
        expected = trainer.eval()["test"]

    assert torch.equal(first["accuracy"], second["accuracy"])
    torch.testing.assert_close(first["accuracy"], expected["accuracy"])
