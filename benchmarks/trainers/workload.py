"""The workloads that every trainer trains: data sets, models and the settings that all of them share.

Everything is ordinary: shuffled data, noise added to each sample when it is read, dropout, Adam.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

BATCH_SIZE = 64
NUM_CLASSES = 10
LEARNING_RATE = 1e-3
SEED = 0


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Grey images of 16 x 16 pixels around one mean for each class.

    Args:
        num_samples: how many images there are.
        augments: whether each read adds new noise, drawn from torch's global generator.
        reads: a file descriptor to which each read appends a byte; None: reads aren't counted. A file, so
            that the count isn't part of the state of a run, which a trainer may save and restore.
        kill_at: the number of reads at which the process is killed, without a chance to clean up.
    """

    def __init__(
        self,
        num_samples: int,
        augments: bool = True,
        reads: int | None = None,
        kill_at: int | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self._targets = torch.randint(NUM_CLASSES, (num_samples,), generator=generator)
        means = torch.randn(NUM_CLASSES, 1, 16, 16, generator=generator)
        self._images = means[self._targets] + torch.randn(
            num_samples, 1, 16, 16, generator=generator
        )
        self._augments = augments
        self._reads = reads
        self._kill_at = kill_at

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, idx: int) -> tuple[Tensor, Tensor]:
        if self._reads is not None:
            os.write(self._reads, b".")
            if self._kill_at is not None and os.fstat(self._reads).st_size >= self._kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        image = self._images[idx]
        if self._augments:
            image = image + 0.1 * torch.randn(1, 16, 16)
        return image, self._targets[idx]


class StepClock(nn.Module):
    """Passes inputs to a model, and notes the time of each training step's forward pass.

    Args:
        model: the model.
        times: a list to which the times are appended, in seconds.
    """

    def __init__(self, model: nn.Module, times: list[float]) -> None:
        super().__init__()
        self.model = model
        self._note = times.append

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the model's outputs."""
        self._note(time.perf_counter())
        outputs: Tensor = self.model(inputs)
        return outputs


def perceptron() -> nn.Module:
    """Returns a network whose step takes less than a millisecond on one core: overhead shows most."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(256, 64),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(64, NUM_CLASSES),
    )


def convolutional() -> nn.Module:
    """Returns a network whose step takes about 20 ms on one core."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(32, NUM_CLASSES),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": perceptron,
    "convolutional": convolutional,
}


@dataclass(frozen=True)
class Workload:
    """What a trainer is to train.

    Attributes:
        build_model: builds the model.
        dataset: the training data.
        num_epochs: passes over the data.
        folder: where checkpoints are, and from where a killed run resumes; "": without checkpoints.
        save_interval: steps between two checkpoints.
    """

    build_model: Callable[[], nn.Module]
    dataset: Images
    num_epochs: int
    folder: str = ""
    save_interval: int = 20

    def loader(self, kind: type[Any] = DataLoader, sampler: Any = None) -> Any:
        """Returns a data loader that shuffles.

        Args:
            kind: torch's class, or another with the same arguments.
            sampler: draws the order; None: as `shuffle=True` does.
        """
        return kind(
            self.dataset,
            batch_size=BATCH_SIZE,
            shuffle=sampler is None,
            sampler=sampler,
            drop_last=True,
        )


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer."""
    return torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
