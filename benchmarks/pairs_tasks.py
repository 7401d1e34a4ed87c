"""The tasks of `pairs.py`: tiny, one of images and one of texts; and what some plugins are given."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from eventloop import State, Task, hookimpl

# B = batch, C = channels, H, W = height and width, T = tokens, V = vocabulary

# What plugins need that sleep without it, or would change nothing in so short a run.
OPTIONS = {
    "curriculum.batch_size": {"1ep": 6},
    "distill.teacher": "pairs_tasks:Teacher",
    "early_stopping.patience": "9ep",
    "ema.half_life": "2ba",
    "orca.callbacks": ["pairs_tasks:OrcaCallback"],
    "swa.start": "1ep",
}


def image_model() -> nn.Module:
    """Returns a network for images (B, 1, 8, 8) of 3 classes, of 4 pixels or more."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 3),
    )  # fmt: skip


def images() -> Task:
    """Returns a task with 6 batches of 4 images an epoch."""
    generator = torch.Generator().manual_seed(0)
    images_BCHW = torch.rand(24, 1, 8, 8, generator=generator)
    labels_B = torch.randint(0, 3, (24,), generator=generator)
    return Task(
        model=image_model,
        loss=cross_entropy,
        metrics={"accuracy": MulticlassAccuracy(3)},
        **_common(TensorDataset(images_BCHW, labels_B)),
    )


def text_model() -> nn.Module:
    """Returns a network for tokens (B, T) of a vocabulary of 16."""
    return nn.Sequential(
        nn.Embedding(16, 16), nn.Linear(16, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 16)
    )


def texts() -> Task:
    """Returns a task with 6 batches of 4 sequences of 32 tokens an epoch."""
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(0, 16, (24, 33), generator=generator)
    return Task(
        model=text_model,
        loss=_text_loss,
        num_tokens=lambda batch: batch[0].numel(),
        **_common(TensorDataset(tokens_BT[:, :-1], tokens_BT[:, 1:])),
    )


KINDS = {"images": images, "texts": texts}


class OrcaCallback:
    """A callback for eventloop-orca: it counts."""

    def after_train_iter(self, runner: object) -> None:
        """Counts."""
        self.num = getattr(self, "num", 0) + 1


class Stops:
    """A callback that saves a checkpoint in the middle of the second epoch, and breaks the run then.

    Raises:
        StoppedError: it is time.
    """

    name = "stops"

    def __init__(self) -> None:
        self.batch = 0

    @hookimpl
    def fit_start(self, state: State) -> None:
        self.batch = state.num_batches * 3 // 2

    @hookimpl
    def should_checkpoint(self, state: State) -> bool:
        return state.clock.batch == self.batch

    @hookimpl
    def batch_end(self, state: State) -> None:
        if state.clock.batch == self.batch + 1:
            raise StoppedError


class StoppedError(Exception):
    """What `Stops` raises."""


class Teacher(nn.Module):
    """A network of each kind, of which the batch says which it is for."""

    def __init__(self) -> None:
        super().__init__()
        self.images, self.texts = image_model(), text_model()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.images(inputs) if inputs.is_floating_point() else self.texts(inputs)


def _common(dataset: TensorDataset) -> dict:
    return {
        "train_dataloader": DataLoader(dataset, 4, shuffle=True),
        "eval_dataloaders": {"test": DataLoader(dataset, 8)},
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
    }


def _text_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())
