"""A run is opened: seeded, with plugins that look at its first batch, and closed where it can't be built."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from eventloop.data import cycled, zipped
from eventloop_testing import isolated_trainer, tiny_batches, tiny_task


def test_everything_that_draws_is_seeded(make_trainer, make_plugin):
    """Python, NumPy and torch, before the model is built."""
    drawn = []

    def draw():
        drawn.append((random.random(), numpy.random.rand(), torch.rand(()).item()))

    for seed in (5, 5, 6):
        make_trainer(algorithms=[make_plugin(init=draw)], seed=seed)

    assert drawn[0] == drawn[1]
    assert not set(drawn[0]) & set(drawn[2])


def test_a_constructor_that_fails_closes(make_trainer, make_task, make_recorder):
    """A plugin may have opened something at `init`."""
    recorder = make_recorder()

    def fail(model):
        raise RuntimeError("no optimizer today")

    with pytest.raises(RuntimeError, match="no optimizer today") as caught:
        make_trainer(make_task(optimizer=fail), algorithms=[recorder])

    assert recorder.seen == ["init", "exception", "close"]
    assert caught.tb  # holds the trainer, so that nothing was closed by the garbage collector


class Counts:
    """Knows where it is."""

    done = 0

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        while self.done < len(self.batches):
            self.done += 1
            yield self.batches[self.done - 1]
        self.done = 0

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


def own_generator():
    data = torch.utils.data.TensorDataset(*map(torch.cat, zip(*tiny_batches(), strict=True)))
    return DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Counts(tiny_batches()),
        own_generator,
        lambda: zipped(own_generator(), cycled(own_generator())),
    ],
)
def test_a_plugin_that_looks_at_the_first_batch_moves_nothing(tmp_path, make_plugin, make):
    """Whether one is installed, mixup for instance, must not change what is trained on."""

    def trained_on(name, plugins):
        seen = []
        watch = make_plugin("watch", batch_start=lambda state: seen.append(str(state.batch)))
        task = tiny_task(
            train_dataloader=make(), forward=lambda model, batch: {"loss": model.weight.sum()},
            model=lambda: torch.nn.Linear(3, 3), loss=None, eval_dataloaders=None,
        )  # fmt: skip
        folder = tmp_path / name
        with isolated_trainer(folder, task, algorithms=plugins, callbacks=[watch]) as trainer:
            trainer.fit()
        return seen

    looks = make_plugin("looks", unsuitable=lambda state: None)

    assert trained_on("with", [looks]) == trained_on("without", [])
