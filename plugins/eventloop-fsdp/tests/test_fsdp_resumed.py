"""Sharded ranks that were stopped and resumed are one run, and their checkpoints anybody's."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Allowed, Task, hookimpl
from eventloop.checkpoint.checkpoint_files import read_checkpoint
from eventloop_fsdp import Fsdp
from eventloop_testing import differences, isolated_trainer, run_ranks

X = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.argmax(1))


class Ends:
    """An algorithm that ends a run before a batch, on all ranks."""

    name = "ends"
    free_options = ("batch",)

    def __init__(self, batch=None):
        self.batch = batch

    @hookimpl
    def batch_start(self, state):
        if state.clock.batch == self.batch:
            raise EOFError


def model():
    """Two layers that repeat, with dropout, and weights whose rows two ranks can't share evenly."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.2)) for _ in range(2)))


def fit(folder, *plugins, batch=None, batch_size=8, **given):
    """Trains 2 epochs of 3 batches over 48 samples, saving every second; gives what is kept."""
    task = Task(
        model=model,
        loss=cross_entropy,
        train_dataloader=lambda: DataLoader(DATA, batch_size, shuffle=True),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    )
    given = {"max_duration": "2ep", "checkpoint_interval": "2ba", "microbatch_size": 4} | given
    with (
        contextlib.suppress(EOFError),
        isolated_trainer(folder, task, algorithms=[*plugins, Ends(batch)], **given) as trainer,
    ):
        trainer.fit()


def last(folder):
    return max((folder / "run" / "checkpoints").glob("ba*"))


def on_two(folder, **given):
    run_ranks(lambda: fit(folder, Fsdp(), **given))


@pytest.fixture(scope="module")
def in_one_go(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one-go")
    on_two(folder)
    return folder


@pytest.mark.sampled(6)
@pytest.mark.parametrize("batches", [[3], [5], [1, 3, 5]])
def test_stopped_and_resumed_it_ends_with_the_same_bits(tmp_path, in_one_go, batches):
    """Whole weights and moments are cut into the shards that they came from."""
    for batch in batches:
        on_two(tmp_path, batch=batch)
    on_two(tmp_path)

    expected, actual = read_checkpoint(last(in_one_go)), read_checkpoint(last(tmp_path))
    assert actual.facts["moment"]["batch"] == 6
    assert list(differences(expected.parts, actual.parts)) == []


def test_a_checkpoint_holds_whole_tensors(in_one_go):
    """What one strategy saved another can load, and a person can look at."""
    parts = read_checkpoint(last(in_one_go)).parts

    assert {name: tuple(one.shape) for name, one in parts["model"].items()} == {
        name: tuple(one.shape) for name, one in model().state_dict().items()
    }
    (optimizer,) = parts["optimizers"].values()
    assert tuple(optimizer["state"][0]["exp_avg"].shape) == (3, 3)


@pytest.mark.nightly
def test_one_process_goes_on_with_what_two_ranks_saved(tmp_path):
    """With the same global batch, without the plugin; and two ranks go on with that."""
    allowed = Allowed(config_change=True, missing_plugin=("fsdp",))
    without = {"batch_size": 16, "microbatch_size": 8}

    on_two(tmp_path, batch=3)
    saved = read_checkpoint(last(tmp_path)).parts
    fit(tmp_path, batch=5, allowed=allowed, **without)
    by_one = read_checkpoint(last(tmp_path)).parts
    run_ranks(lambda: fit(tmp_path, Fsdp(), allowed=allowed))

    ended = read_checkpoint(last(tmp_path))
    moments = [one["optimizers"]["adamw"]["state"][0]["step"].item() for one in (saved, by_one)]
    assert moments == [2, 4]
    assert saved["model"].keys() == by_one["model"].keys() == ended.parts["model"].keys()
    assert ended.facts["moment"] | {"seconds": 0} == {
        "epoch": 2, "batch": 6, "sample": 96, "token": 0, "seconds": 0,
    }  # fmt: skip
