"""The reference of the soak test: something of everything that a resumed run could get wrong."""

from __future__ import annotations

import os
import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from eventloop import State, Task, hookimpl, schedules
from eventloop_jsonl import Jsonl
from eventloop_mixup import Mixup


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are disturbed at random, by each of three generators."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(num_samples, 16, generator=generator)
        self.targets = self.inputs[:, :4].argmax(1)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, idx: int) -> tuple[Tensor, Tensor]:
        noise = 0.1 * torch.randn(16) + random.gauss(0, 0.1) + np.random.normal(0, 0.1)
        return (self.inputs[idx] + noise).float(), self.targets[idx]


class Walk:
    """An algorithm with a state: scales the inputs by a random walk, each rank its own."""

    name = "walk"
    state_per_rank = True

    def __init__(self) -> None:
        self.at = torch.ones(16)
        self.num_steps = 0

    @hookimpl
    def before_train_batch(self, state: State) -> None:
        self.at = self.at + 0.01 * torch.randn(16, generator=state.generator("walk"))
        self.num_steps += 1
        state.inputs = state.inputs * self.at
        state.log("walk/at", self.at.norm())

    def state_dict(self) -> dict[str, object]:
        return {"at": self.at, "num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, object], version: str) -> None:
        self.at, self.num_steps = state["at"], state["num_steps"]


def task(lr: float = 3e-3) -> Task:
    """A small network on noisy samples.

    Args:
        lr: the largest learning rate.
    """
    # No option: it may be another one each time that the run goes on.
    workers = int(os.environ.get("SOAK_WORKERS", "0"))
    return Task(
        model=lambda: nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4)
        ),
        loss=cross_entropy,
        train_dataloader=DataLoader(Noisy(400), 16, shuffle=True, num_workers=workers),
        eval_dataloaders={"test": DataLoader(Noisy(64), 32)},
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr),
        scheduler=schedules.cosine(warmup="0.1dur"),
        algorithms=[Mixup(alpha=0.4), Walk()],
        callbacks=[Jsonl()],
        settings={
            "max_duration": "20ep",
            "microbatch_size": 8,
            "clip_norm": 1.0,
            "device": "cpu",
            "checkpoint_interval": "7ba",
        },
    )
