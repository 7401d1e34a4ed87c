"""MosaicML Composer, with `save_interval`, `autoresume` and the sampler of its documents.

Source: https://docs.mosaicml.com/projects/composer/en/stable/trainer/checkpointing.html
"""

from __future__ import annotations

import logging
from typing import Any

import composer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from workload import SEED, Workload, adam

VERSION = composer.__version__
logging.getLogger("composer").setLevel(logging.ERROR)


class Module(composer.models.ComposerModel):  # type: ignore[misc]
    """The model with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the outputs of a batch."""
        outputs: Tensor = self.model(batch[0])
        return outputs

    def loss(self, outputs: Tensor, batch: tuple[Tensor, Tensor], *_: Any) -> Tensor:
        """Returns the loss of a batch."""
        return cross_entropy(outputs, batch[1])


def train(workload: Workload) -> nn.Module:
    """Trains a workload; returns the trained model."""
    composer.utils.reproducibility.seed_all(SEED)
    checkpoints: dict[str, Any] = {}
    if workload.folder:
        checkpoints = {
            "save_folder": workload.folder,
            "save_interval": f"{workload.save_interval}ba",
            "run_name": "run",
            "autoresume": True,
        }
    module = Module(workload.build_model())
    sampler = composer.utils.dist.get_sampler(workload.dataset, shuffle=True, drop_last=True)
    trainer = composer.Trainer(
        model=module, train_dataloader=workload.loader(sampler=sampler),
        optimizers=adam(module), device="cpu",
        max_duration=f"{workload.num_epochs}ep", seed=SEED, progress_bar=False, **checkpoints,
    )  # fmt: skip
    trainer.fit()
    trainer.close()
    return module.model
