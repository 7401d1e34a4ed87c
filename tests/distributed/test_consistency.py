"""Ranks that would train differently stop before the first step; functions may differ."""

from __future__ import annotations

import os

import jsonargparse  # noqa: F401  each rank, a fork, would take seconds for these imports
import pytest
import torch
import torch._dynamo
from torch import nn
from torch.nn.functional import cross_entropy

from eventloop import (
    Task,
    Trainer,
    hookimpl,
)
from eventloop_testing import isolated_trainer, run_ranks, tiny_task
from eventloop_testing.case import tiny_batches
from eventloop_testing.ranks import RankError


class Watches:
    """Does nothing."""

    name = "watches"

    @hookimpl
    def batch_end(self, state):
        pass


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("settings", r"their settings differ[\s\S]*clip_norm: 1\.0 on rank 0, 2\.0 on rank 1"),
        ("plugins", r"their plugins differ[\s\S]*watches"),
        (
            "model",
            r"their models differ[\s\S]*weight float32\[3, 3\] on rank 0, weight float32\[4, 3\]",
        ),
    ],
)
def test_ranks_that_would_train_different_things_stop(tmp_path, what, message):
    """Before the first step, with what differs."""

    def run():
        rank = int(os.environ["RANK"])
        task = Task(
            model=lambda: nn.Linear(3, 3 + rank * (what == "model")),
            loss=cross_entropy,
            train_dataloader=tiny_batches(4),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        )
        plugins = [Watches()] if what == "plugins" and rank else []
        clip_norm = 1.0 + rank * (what == "settings")
        isolated_trainer(tmp_path, task, algorithms=plugins, clip_norm=clip_norm)

    with pytest.raises(RankError, match=message):
        run_ranks(run)


class Prints:
    """A callback that is given functions."""

    def __init__(self, write=print, *, also=(), by_name=None) -> None:
        self.write = write
        self.also = list(also)
        self.by_name = dict(by_name or {})

    @hookimpl
    def batch_end(self, state):
        self.write(state.clock.batch)


def test_functions_may_differ_between_ranks(clean):
    """A rank prints and the others don't; what a function does isn't known by its name."""

    def train():
        is_first = os.environ["RANK"] == "0"
        writes = [].append if is_first else repr
        given = {"also": [writes], "by_name": {"a": writes}} if is_first else {"write": writes}
        with Trainer(tiny_task(), callbacks=[Prints(**given)], device="cpu", autoload=False,
                     max_duration="1ba") as trainer:  # fmt: skip
            trainer.fit()
            return trainer.state.manifest["plugins"][0]["options"]

    assert run_ranks(train) == [
        {"also": ["list.append"], "by_name": {"a": "list.append"}},
        {"write": "repr", "by_name": {}},
    ]
