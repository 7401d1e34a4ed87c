"""Processes that die in mid-batch: the last checkpoint of such a run is that of one in one go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lit_cases import DATA, Measures, Net, plateau
from torch.utils.data import DataLoader

import eventloop_lightning
from eventloop_ema import Ema
from eventloop_testing import Dies, KilledRuns, isolated_trainer


class OnPlateau(Net):
    def __init__(self) -> None:
        super().__init__(plateau("epoch", "val_loss"))


def averaged() -> EMAWeightAveraging:
    return EMAWeightAveraging(decay=0.9)


def late_average() -> StochasticWeightAveraging:
    return StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)


KINDS = {
    "plateau": (OnPlateau, {"accumulate_grad_batches": 4}),
    "metrics": (Measures, {}),
    "averages": (Net, {"callbacks": [averaged]}),
    "SWA": (Net, {"callbacks": [late_average]}),
}


def with_data(kind: type) -> type:
    def train_dataloader(self: Any) -> Any:
        return DataLoader(DATA, 8, shuffle=True)

    def val_dataloader(self: Any) -> Any:
        return DataLoader(DATA, 10)

    methods = {"train_dataloader": train_dataloader, "val_dataloader": val_dataloader}
    return type(kind.__name__, (kind,), methods)


def fit(folder: Path, batch: int | None, name: str) -> None:
    """Trains 18 batches, saving every second; may die."""
    kind, options = KINDS[name]
    task = eventloop_lightning.task(with_data(kind), **options)
    given = {"max_duration": "3ep", "checkpoint_interval": "2ba"}
    with isolated_trainer(folder, task, algorithms=[Ema(), Dies(batch)], **given) as trainer:
        trainer.fit()


EVERY, *OTHERS = KINDS


@pytest.fixture(
    scope="module",
    params=[EVERY, *(pytest.param(one, marks=pytest.mark.nightly) for one in OTHERS)],
)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> KilledRuns:
    return KilledRuns(fit, tmp_path_factory.mktemp("one-go"), request.param)


def test_killed_and_resumed_it_ends_with_the_same_checkpoint(tmp_path, runs):
    """Weights, optimizer, generators, counts of Lightning's loops, callbacks, and ema of ours."""
    assert runs.whole.batch in (18, 24)  # SWA adds an epoch for batch norms
    assert runs.differing(tmp_path, 3, 9, 9, 14) == []


def test_without_what_lightning_keeps_it_would_end_elsewhere(tmp_path, runs):
    """Control: the counts of its loops are forgotten."""

    def forget(parts: dict[str, Any]) -> None:
        parts["plugins"]["task"]["state"]["loops"]["fit_loop"]["epoch_loop.batch_progress"][
            "total"
        ]["ready"] = 0

    assert runs.differing(tmp_path, 9, forget=forget) != []
