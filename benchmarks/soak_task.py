"""The reference of the soak test: something of everything that a resumed run could get wrong."""

from __future__ import annotations

import importlib
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    WeightedRandomSampler,
    default_collate,
)

from eventloop import State, Task, hookimpl, schedules
from eventloop.data import collated, cycled, zipped
from eventloop.data.combined import Zipped
from eventloop.toolbox import map_tensors
from eventloop_jsonl import Jsonl
from eventloop_mixup import Mixup
from eventloop_streaming.bucketing import LengthBatchSampler, TokenBatchSampler


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


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The same samples as a stream, undisturbed: a run that goes on reads its epoch once more."""

    def __init__(self, num_samples: int) -> None:
        self.samples = Noisy(num_samples)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(self.samples.inputs, self.samples.targets, strict=True))


def map_style(workers: int) -> DataLoader[Any]:
    """Shuffles samples."""
    return DataLoader(Noisy(400), 16, shuffle=True, num_workers=workers)


def weighted(workers: int) -> DataLoader[Any]:
    """Draws samples with weights."""
    sampler = WeightedRandomSampler(torch.linspace(0.1, 1, 400).tolist(), 400)
    return DataLoader(Noisy(400), 16, sampler=sampler, num_workers=workers)


def in_batches(workers: int) -> DataLoader[Any]:
    """Takes a sampler of batches."""
    sampler = BatchSampler(WeightedRandomSampler([1.0] * 400, 400), 16, drop_last=True)
    return DataLoader(Noisy(400), batch_sampler=sampler, num_workers=workers)


def stream(workers: int) -> DataLoader[Any]:
    """Reads a stream, in one process: workers would each read all of it."""
    return DataLoader(Stream(400), 16)


def side_by_side(workers: int) -> Zipped:
    """Goes through two loaders at once; the second, smaller one begins again and again."""
    small = DataLoader(Noisy(72), 8, shuffle=True, num_workers=workers)
    return zipped(map_style(workers), cycled(small))


def by_length(workers: int) -> DataLoader[Any]:
    """Takes batches of similar lengths, in parts."""
    return _in_parts(LengthBatchSampler(LENGTHS, 16), workers)


def by_tokens(workers: int) -> DataLoader[Any]:
    """Takes batches of as many tokens, in parts."""
    return _in_parts(TokenBatchSampler(LENGTHS, 600), workers)


def _in_parts(sampler: Any, workers: int) -> DataLoader[Any]:
    collate_fn = collated(default_collate, microbatch_size=5)
    return DataLoader(Noisy(400), batch_sampler=sampler, num_workers=workers, collate_fn=collate_fn)


LENGTHS = [1 + idx * 37 % 101 for idx in range(400)]
IN_PARTS = ("by_length", "by_tokens")
LOADERS = {
    one.__name__: one
    for one in (map_style, weighted, in_batches, stream, side_by_side, by_length, by_tokens)
}
# With options, for a model of two layers and a short run; imported where they are drawn.
ALGORITHMS: dict[str, dict[str, Any]] = {
    "agc.Agc": {},
    "ema.Ema": {},
    "label_smoothing.LabelSmoothing": {},
    "muon.Muon": {"hidden": ["0.weight"]},
    "sam.Sam": {},
    "swa.Swa": {"start": "5ep", "interval": "10ba"},
}
UNSUITABLE = {
    ("stream", "swa.Swa"),  # it estimates batch norms by another pass over the data
    ("side_by_side", "swa.Swa"),  # likewise, with the batches of the loader
    # It asks for one tensor of targets.
    *((name, "label_smoothing.LabelSmoothing") for name in ("side_by_side", *IN_PARTS)),
}


def set_up(number: str) -> tuple[str, list[str]]:
    """Returns the loader and the algorithms of a set-up; those of the plain soak for ""."""
    if not number:
        return "map_style", []
    draw = random.Random(number)
    loader = draw.choice([*LOADERS])
    names = draw.sample([*ALGORITHMS], draw.randint(1, 4))
    return loader, [one for one in names if (loader, one) not in UNSUITABLE]


def made(name: str) -> object:
    """Returns an algorithm of `ALGORITHMS`."""
    package, _, kind = name.partition(".")
    return getattr(importlib.import_module(f"eventloop_{package}"), kind)(**ALGORITHMS[name])


class Joined:
    """An algorithm that makes one batch of those of two loaders."""

    name = "joined"

    @hookimpl
    def after_dataloader(self, state: State) -> None:
        state.batch = tuple(torch.cat(pair) for pair in zip(*state.batch, strict=True))


class Walk:
    """An algorithm with a state: scales the inputs by a random walk, each rank its own."""

    name = "walk"
    state_per_rank = True

    def __init__(self) -> None:
        self.at = torch.ones(16)
        self.num_steps = 0

    @hookimpl
    def before_train_batch(self, state: State) -> None:
        step = torch.randn(16, device=state.device, generator=state.generator("walk"))
        self.at = self.at.to(state.device) + 0.01 * step
        self.num_steps += 1
        state.batch = map_tensors(
            lambda one: one * self.at if one.is_floating_point() else one, state.batch
        )
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
    loader, algorithms = set_up(os.environ.get("SOAK_SET_UP", ""))
    if loader == "side_by_side":
        first: list[object] = [Joined()]
    else:
        first = [] if loader in IN_PARTS else [Mixup(alpha=0.4)]
    norm = nn.LayerNorm if loader in IN_PARTS else nn.BatchNorm1d  # of a part of one sample, too
    settings: dict[str, Any] = {} if "agc.Agc" in algorithms else {"clip_norm": 1.0}
    if loader not in IN_PARTS:
        settings["microbatch_size"] = 8
    return Task(
        model=lambda: nn.Sequential(
            nn.Linear(16, 32), norm(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4)
        ),
        loss=cross_entropy,
        train_dataloader=LOADERS[loader](workers),
        eval_dataloaders={"test": DataLoader(Noisy(64), 32)},
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr),
        scheduler=schedules.cosine(warmup="0.1dur"),
        algorithms=[*first, Walk(), *map(made, algorithms)],
        callbacks=[Jsonl()],
        settings={
            "max_duration": "500ba" if loader == "stream" else "20ep",
            **settings,
            "device": "cpu",
            "checkpoint_interval": "7ba",
        },
    )
