"""Libraries that build on Lightning, with Lightning's trainer and with eventloop's: the same weights?

    python plugins/eventloop-lightning/tools/foreign.py [chemprop lightly scvi neuralforecast pytorch_tabular]

Each library trains a small model in a process of its own: by Lightning's trainer; after the one line
`eventloop_lightning.install()`; and so with a `run_dir` in a run that is killed by SIGKILL after a third and
two thirds of its batches, and started again. A line for each: batches, whether weights and the next random number are Lightning's, and
whether they are after the kills. Libraries that aren't installed are left out.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eventloop import hookimpl

NUM_KILLS = 2
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}


def chemprop() -> torch.nn.Module:
    """Returns a message passing network that has learned to count atoms."""
    from chemprop import data, models, nn
    from lightning.pytorch import Trainer

    smiles = ["C" * (1 + idx % 7) + "O" * (idx % 3) + "N" * (idx % 2) for idx in range(40)]
    points = [data.MoleculeDatapoint.from_smi(one, [float(len(one))]) for one in smiles]
    loaders = [
        data.build_dataloader(data.MoleculeDataset(part), batch_size=8, shuffle=shuffle)
        for part, shuffle in ((points[:32], True), (points[32:], False))
    ]
    ffn = nn.RegressionFFN(dropout=0.1)
    model = models.MPNN(nn.BondMessagePassing(dropout=0.1), nn.MeanAggregation(), ffn)
    Trainer(max_epochs=3, accelerator="cpu", enable_checkpointing=False, **QUIET).fit(
        model, *loaders
    )
    return model


def lightly() -> torch.nn.Module:
    """Returns a SimCLR network."""
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    class SimCLR(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = torch.nn.Sequential(
                torch.nn.Conv2d(3, 8, 3, stride=2), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
                torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
            )  # fmt: skip
            self.head = SimCLRProjectionHead(8, 8, 4)
            self.criterion = NTXentLoss()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            (images,) = batch
            views = [images + 0.1 * torch.randn_like(images) for _ in range(2)]
            loss: Tensor = self.criterion(*(self.head(self.backbone(one)) for one in views))
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.06)

    loader = DataLoader(TensorDataset(torch.randn(32, 3, 16, 16)), 8, shuffle=True)
    model = SimCLR()
    Trainer(max_epochs=3, accelerator="cpu", enable_checkpointing=False, **QUIET).fit(model, loader)
    return model


def scvi() -> torch.nn.Module:
    """Returns a variational autoencoder of cells."""
    import anndata
    import scvi

    scvi.settings.seed = 0  # of its own split of the data
    counts = np.random.default_rng(0).poisson(2.0, (128, 20)).astype(np.float32)
    cells = anndata.AnnData(counts)
    scvi.model.SCVI.setup_anndata(cells)
    model = scvi.model.SCVI(cells, n_hidden=16, n_latent=4)
    model.train(max_epochs=3, accelerator="cpu", batch_size=32, enable_progress_bar=False)
    module: torch.nn.Module = model.module
    return module


def neuralforecast() -> torch.nn.Module:
    """Returns an NHITS model of two series."""
    import pandas as pd
    from neuralforecast import NeuralForecast
    from neuralforecast.models import NHITS

    days = pd.date_range("2020-01-01", periods=80)
    series = [
        pd.DataFrame({"unique_id": str(idx), "ds": days, "y": np.sin(np.arange(80) / (3 + idx))})
        for idx in range(2)
    ]
    model = NHITS(h=4, input_size=8, max_steps=12, mlp_units=3 * [[16, 16]], dropout_prob_theta=0.1,
                  accelerator="cpu", enable_checkpointing=False, **QUIET)  # fmt: skip
    forecast = NeuralForecast(models=[model], freq="D")
    forecast.fit(pd.concat(series))
    fitted: torch.nn.Module = forecast.models[0]
    return fitted


def pytorch_tabular() -> torch.nn.Module:
    """Returns a classifier of a table."""
    import pandas as pd
    from pytorch_tabular import TabularModel
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
    from pytorch_tabular.models import CategoryEmbeddingModelConfig

    values = np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32)
    table = pd.DataFrame(values, columns=list("abcd"))
    table["target"] = (table["a"] > 0).astype(int)
    model = TabularModel(
        data_config=DataConfig(target=["target"], continuous_cols=list("abcd")),
        model_config=CategoryEmbeddingModelConfig(task="classification", layers="16-8", dropout=0.1),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(max_epochs=3, batch_size=16, accelerator="cpu", checkpoints=None,
                                     early_stopping=None, load_best=False, progress_bar="none",
                                     trainer_kwargs={"enable_model_summary": False}),
        verbose=False,
    )  # fmt: skip
    model.fit(train=table, seed=0)
    network: torch.nn.Module = model.model
    return network


LIBRARIES: dict[str, Callable[[], torch.nn.Module]] = {
    one.__name__: one for one in (chemprop, lightly, scvi, neuralforecast, pytorch_tabular)
}
_PACKAGES = {"scvi": "scvi-tools"}


class Killed:
    """Kills the process when a batch is done, and counts batches.

    Args:
        at: the batch; 0 for none.
    """

    num_batches = 0

    def __init__(self, at: int) -> None:
        self._at = at

    @hookimpl
    def batch_checkpoint(self, state: Any) -> None:
        """Ends the process at its batch, with a signal that can't be caught."""
        Killed.num_batches = state.clock.batch
        if self._at == state.clock.batch:
            os.kill(os.getpid(), signal.SIGKILL)


def train(name: str, out: Path, run_dir: str, at: int) -> None:
    """Trains a library's model in this process; writes what it ends with.

    Args:
        run_dir: of eventloop's trainer; "" for none, "lightning" for Lightning's trainer.
        at: the batch in which it is killed; 0 for none.
    """
    warnings.simplefilter("ignore")
    if torch.version.cuda is None and importlib.util.find_spec("torchvision") is not None:
        # What a wheel of torchvision for CUDA can't load, and asks for when it is imported.
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    importlib.import_module(name)
    if run_dir != "lightning":
        import eventloop_lightning

        settings = {"run_dir": run_dir, "checkpoint_interval": "2ba"} if run_dir else None
        eventloop_lightning.install(settings=settings, watchers=[Killed(at)])
    import lightning

    lightning.seed_everything(0)
    module = LIBRARIES[name]()
    weights = {key: one for key, one in module.state_dict().items() if isinstance(one, Tensor)}
    weights["the next random number"] = torch.rand(())
    torch.save({"weights": weights, "num_batches": Killed.num_batches}, out)


def ended(name: str, run_dir: str, at: int = 0) -> dict[str, Any] | None:
    """Returns what a process ends with that trains a library's model; None if it was killed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.pt")
        command = [
            sys.executable,
            __file__,
            name,
            "--out",
            str(out),
            "--run-dir",
            run_dir,
            "--at",
            str(at),
        ]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode == -signal.SIGKILL:
            return None
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        found: dict[str, Any] = torch.load(out)
        return found


def differing(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Returns what differs of two ends: "equal" where nothing does."""
    first, second = one["weights"], other["weights"]
    names = [key for key in first if key not in second or not torch.equal(first[key], second[key])]
    return f"{len(names)} of {len(first)} differ: {names[0]}" if names else "equal"


def row_of(name: str) -> str:
    """Trains a library's model three times; returns the line of the table."""
    expected, ours = ended(name, "lightning"), ended(name, "")
    assert expected is not None
    assert ours is not None
    num_batches = ours["num_batches"]
    with tempfile.TemporaryDirectory() as run_dir:
        place = f"{run_dir}/run"
        kills = [num_batches * (idx + 1) // (NUM_KILLS + 1) for idx in range(NUM_KILLS)]
        was_killed = [ended(name, place, at) is None for at in kills]
        resumed = ended(name, place)
    assert resumed is not None
    label = f"{_PACKAGES.get(name, name)} {version(_PACKAGES.get(name, name))}"
    return (
        f"{label}: {num_batches} batches; {differing(expected, ours)}; "
        f"killed {sum(was_killed)} times: {differing(expected, resumed)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="libraries; all unless given")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--run-dir", default="", help=argparse.SUPPRESS)
    parser.add_argument("--at", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.out is not None:
        train(given.names[0], given.out, given.run_dir, given.at)
        return
    for name in given.names or LIBRARIES:
        if importlib.util.find_spec(name) is not None:
            try:
                print(row_of(name), flush=True)
            except Exception as error:  # noqa: BLE001 - of a library, whatever it is
                print(f"{name}: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
