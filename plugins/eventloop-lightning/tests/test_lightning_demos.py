"""Modules that were not written here: those that Lightning ships, and those of another package."""

from __future__ import annotations

import importlib.util
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos import LightningTransformer
from lightning.pytorch.demos.boring_classes import (
    BoringDataModule,
    BoringDataModuleNoLen,
    BoringModel,
    DemoModel,
    ManualOptimBoringModel,
    RandomDataset,
)
from lightning.pytorch.demos.lstm import LightningLSTM
from lit_cases import Case, fitted, told
from torch.utils.data import DataLoader, TensorDataset

from eventloop_lightning import Trainer

HAS_PUBLIC = importlib.util.find_spec("pytorch_forecasting") is not None


def of_text() -> tuple[Any, Any]:
    words = torch.randint(50, (24, 9), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(words[:, :-1], words[:, 1:]), 6, shuffle=True), None


def of_vectors() -> tuple[Any, Any]:
    return DataLoader(RandomDataset(32, 24), 6, shuffle=True), None


class Transformer(LightningTransformer):
    def prepare_data(self) -> None:
        """Downloads nothing: the words are drawn."""


class Lstm(LightningLSTM):
    def prepare_data(self) -> None:
        """Likewise."""


DEMOS = {
    "BoringModel": Case(BoringModel, lambda: (None, None)),
    "BoringModel, BoringDataModule": Case(BoringModel, lambda: (BoringDataModule(), None)),
    "BoringModel, no length": Case(BoringModel, lambda: (BoringDataModuleNoLen(), None)),
    "ManualOptimBoringModel": Case(ManualOptimBoringModel, lambda: (None, None)),
    "DemoModel": Case(DemoModel, of_vectors),
    "LightningTransformer": Case(lambda: Transformer(vocab_size=50), of_text),
    "LightningLSTM": Case(lambda: Lstm(vocab_size=50), of_text),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", DEMOS)
def test_a_demo_of_lightnings_ends_with_the_same_weights(name):
    """They are what a reader of its documents begins with."""
    theirs = told(*fitted(pl.Trainer, DEMOS[name], max_epochs=2))

    ours = told(*fitted(Trainer, DEMOS[name], max_epochs=2))

    assert ours == theirs


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", ["TemporalFusionTransformer", "NHiTS", "DeepAR", "RecurrentNetwork"]
)
def test_a_public_module_ends_with_the_same_weights(name):
    """pytorch-forecasting's log much, validate, follow a plateau and hook into many places."""
    theirs = told(*fitted(pl.Trainer, forecasting(name)))

    ours = told(*fitted(Trainer, forecasting(name)))

    assert ours == theirs


if not HAS_PUBLIC:
    del test_a_public_module_ends_with_the_same_weights


def forecasting(name: str) -> Case:
    import numpy as np
    import pandas as pd
    import pytorch_forecasting as public
    from pytorch_forecasting.metrics import SMAPE, NormalDistributionLoss, QuantileLoss

    losses = {
        "TemporalFusionTransformer": {"loss": QuantileLoss(), "output_size": 7},
        "DeepAR": {"loss": NormalDistributionLoss()},
    }
    draw = np.random.default_rng(0)
    times = np.arange(60)
    series = [
        pd.DataFrame(
            {
                "time_idx": times,
                "value": np.sin(times / 5 + group) + draw.normal(0, 0.1, 60) + 3,
                "group": str(group),
            }
        )
        for group in range(6)
    ]
    table = pd.concat(series, ignore_index=True)
    known = {"time_idx": "time_idx", "target": "value", "group_ids": ["group"]}
    lengths = {"max_encoder_length": 12, "max_prediction_length": 4}
    training = public.TimeSeriesDataSet(
        table[table.time_idx < 50],
        **known,
        **lengths,
        time_varying_unknown_reals=["value"],
        target_normalizer=public.GroupNormalizer(groups=["group"]),
    )
    validation = public.TimeSeriesDataSet.from_dataset(training, table, min_prediction_idx=50)

    def data() -> tuple[Any, Any]:
        options = {"num_workers": 0}
        return (
            training.to_dataloader(train=True, batch_size=16, **options),
            validation.to_dataloader(train=False, batch_size=32, **options),
        )

    def module() -> Any:
        options = {"hidden_size": 8, "dropout": 0.1, "learning_rate": 0.01, "loss": SMAPE()}
        return getattr(public, name).from_dataset(training, **{**options, **losses.get(name, {})})

    return Case(module, data, {"gradient_clip_val": 0.1, "limit_train_batches": 6})
