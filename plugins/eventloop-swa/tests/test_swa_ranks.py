"""Means on several ranks."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from eventloop_fsdp import Fsdp
from eventloop_swa import Swa
from eventloop_testing import isolated_trainer, run_ranks, tiny_batches, tiny_task
from eventloop_testing.ranks import RankError

DATA = TensorDataset(*map(torch.cat, zip(*tiny_batches(6, 8), strict=True)))


def with_norm():
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def fit(folder, batch_size, *plugins, model=None, **settings):
    changes = {"model": model} if model else {}
    task = tiny_task(train_dataloader=DataLoader(DATA, batch_size), **changes)
    given = {"algorithms": [Swa(start="2ep"), *plugins], "max_duration": "4ep"}
    with isolated_trainer(folder, task, **given | settings) as trainer:
        trainer.fit()
        path = trainer.export(folder / "model.safetensors")
        off = {one.found.name: one.reason for one in trainer.off}
    return load_file(path) if trainer.state.rank == 0 else {}, off


def test_two_ranks_have_the_mean_of_one(tmp_path):
    """All ranks have the same weights."""
    alone, _ = fit(tmp_path / "alone", 16)

    (actual, _), _ = run_ranks(fit, tmp_path / "two", 8)

    for name, value in alone.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=1e-6)
    assert not torch.allclose(
        fit(tmp_path / "other", 8)[0]["0.weight"], alone["0.weight"], atol=1e-3
    )


@pytest.mark.nightly
def test_statistics_are_those_of_the_data_of_all_ranks(tmp_path):
    """As if one process had gone through the batches of both."""
    (found, _), _ = run_ranks(fit, tmp_path, 8, model=with_norm)
    model = with_norm()
    model.load_state_dict(found)
    parts = [DistributedSampler(DATA, 2, rank, shuffle=False) for rank in (0, 1)]
    update_bn([batch for one in parts for batch in DataLoader(DATA, 8, sampler=one)], model)

    for name in ("1.running_mean", "1.running_var"):
        torch.testing.assert_close(found[name], model.state_dict()[name], rtol=0, atol=1e-6)


@pytest.mark.nightly
def test_shared_batch_norms_have_one_estimate(tmp_path):
    """They wait for each other in every pass, also where one rank has less data than the other."""
    results = run_ranks(fit, tmp_path, 7, model=with_norm, sync_batch_norm=True)

    assert results[0][0]["1.num_batches_tracked"] == 4


def test_a_sharded_model_is_refused(tmp_path):
    """No rank has the whole of it to copy; as an installed plugin it stands off."""
    with pytest.raises(RankError, match="the model's weights are sharded"):
        run_ranks(fit, tmp_path, 8, Fsdp())
