"""A run that goes on sees the data that it would have seen, with other workers, and other ranks."""

from __future__ import annotations

import random
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader

from eventloop import Task, hookimpl, schedules
from eventloop_testing import isolated_trainer, run_ranks
from eventloop_testing.ranks import RankError


class Drawing(Dataset):
    """Samples with noise from Python, NumPy and torch."""

    def __len__(self):
        return 26

    def __getitem__(self, idx):
        noise = random.random() + np.random.rand() + torch.rand(())
        return torch.tensor([idx / 26, 1.0, 0.0]) + 0.1 * noise.float(), idx % 3


def narrow():
    return nn.Linear(3, 3)


def deep():
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))


def fit(folder, until=None, model=deep, batch_size=4, **loading):
    """Trains over three epochs of seven batches, or a part of that; gives the weights."""

    def load():
        return DataLoader(Drawing(), batch_size, shuffle=True, **loading)

    task = Task(
        model=model,
        loss=cross_entropy,
        train_dataloader=load,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    )
    settings = {"max_duration": "3ep", "checkpoint_interval": "1ba"}
    with isolated_trainer(folder, task, **settings) as trainer:
        trainer.fit(until=until)
        return {name: one.clone() for name, one in trainer.state.model.state_dict().items()}


@pytest.mark.nightly
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_may_change_from_one_process_to_the_next(tmp_path, persistent):
    """The last bit of the weights is that of the run that was never stopped."""
    started = {"num_workers": 2, "persistent_workers": persistent}
    expected = fit(tmp_path / "in one go", **started)

    folder = tmp_path / "stopped"
    fit(folder, "3ba", **started)
    for until, num_workers in [("5ba", 0), ("7ba", 1), ("9ba", 0), (None, 2)]:
        stays = persistent and num_workers > 0
        actual = fit(folder, until, num_workers=num_workers, persistent_workers=stays)

    assert all(torch.equal(one, expected[name]) for name, one in actual.items())


def test_two_ranks_go_on_as_one_process_and_as_two(tmp_path):
    """The steps are those of two ranks all along; sums are rounded in another order."""
    given = {"model": narrow}
    expected = run_ranks(fit, tmp_path / "in one go", batch_size=2, **given)[0]

    folder = tmp_path / "stopped"
    run_ranks(fit, folder, "3ba", batch_size=2, **given)
    fit(folder, "9ba", batch_size=4, **given)
    actual = run_ranks(fit, folder, batch_size=2, **given)[0]

    for name, one in actual.items():
        torch.testing.assert_close(one, expected[name], rtol=0, atol=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:batch_size [0-9]")
@pytest.mark.parametrize(
    ("ranks", "untils"),
    [
        ((2, 1, 2), ("3ba", "9ba")),
        ((4, 3, 4), ("3ba", "14ba")),
        pytest.param((4, 1, 3), ("7ba", "9ba"), marks=[pytest.mark.nightly]),
        pytest.param((2, 1, 2), ("7ba", "14ba"), marks=[pytest.mark.nightly]),
    ],
)
def test_a_step_keeps_its_samples_with_the_ranks_that_are_there(tmp_path, ranks, untils):
    """With the same command line, in mid-epoch and between epochs, whether they divide it or not."""
    given = {"model": narrow, "batch_size": 4 // ranks[0]}
    expected = run_ranks(fit, tmp_path / "in one go", world_size=ranks[0], **given)[0]

    for world_size, until in zip(ranks, (*untils, None), strict=True):
        actual = run_ranks(fit, tmp_path / "lost", until, world_size=world_size, **given)[0]

    for name, one in actual.items():
        torch.testing.assert_close(one, expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("until", ["5ba", "1ep"])
@pytest.mark.parametrize("schedule", ["cosine", "steps"])
@pytest.mark.filterwarnings("ignore:batch_size [0-9]")
def test_fewer_ranks_keep_the_rates_and_the_evaluations(tmp_path, schedule, until):
    """A step keeps its samples, so an epoch keeps its steps, by which schedules and fractions count."""

    def falling(optimizer, total_steps):
        return LambdaLR(optimizer, lambda step: 1 - step / total_steps)

    class Watch:
        role = "callback"

        def __init__(self):
            self.seen = []

        @hookimpl
        def batch_start(self, state):
            (optimizer,) = state.optimizers.values()
            self.seen.append((state.num_batches, optimizer.param_groups[0]["lr"]))

        @hookimpl
        def eval_after_all(self, state):
            self.seen.append("evaluated")

    def watched(folder, until=None):
        task = Task(
            model=narrow,
            loss=cross_entropy,
            train_dataloader=lambda: DataLoader(Drawing(), 2, shuffle=True),
            eval_dataloaders=lambda: DataLoader(Drawing(), 8),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            scheduler=schedules.cosine(warmup="0.5ep") if schedule == "cosine" else falling,
        )
        settings = {"max_duration": "3ep", "checkpoint_interval": "1ba", "eval_interval": "0.5ep"}
        with isolated_trainer(folder, task, callbacks=[watch := Watch()], **settings) as trainer:
            trainer.fit(until=until)
        return watch.seen

    expected = run_ranks(watched, tmp_path / "whole")[0]

    run_ranks(watched, tmp_path / "stopped", until)
    seen = watched(tmp_path / "stopped")

    assert seen == expected[-len(seen) :]


def test_the_samples_of_a_step_that_fewer_ranks_share_are_said(tmp_path):
    """A rank takes more of them, which may not fit into its memory."""
    run_ranks(fit, tmp_path, "3ba", model=narrow, batch_size=2)

    with pytest.warns(UserWarning, match="batch_size 4 a rank, not 2: a step keeps the 4 samples"):
        fit(tmp_path, model=narrow, batch_size=2)


def test_more_ranks_than_samples_of_a_step_are_refused(tmp_path):
    """Some would have nothing to train on."""
    fit(tmp_path, "3ba", model=narrow, batch_size=2)

    with pytest.raises(RankError, match=r"with 2 samples a step, fewer than the 3 ranks"):
        run_ranks(fit, tmp_path, model=narrow, batch_size=2, world_size=3)


class Sampling(nn.Linear):
    """Draws in evaluation, as what evaluates samples of its own does."""

    def forward(self, inputs):
        noise = 0 if self.training else torch.rand_like(inputs) + random.random()
        return super().forward(inputs + noise)


def test_what_an_evaluation_draws_is_drawn_again(tmp_path):
    """Its numbers are those of a run that was never stopped, and the training's draws are left alone."""

    def evaluated(folder, *untils):
        for until in untils:
            task = Task(
                model=lambda: nn.Sequential(Sampling(3, 3), nn.Dropout(0.3)),
                loss=cross_entropy,
                train_dataloader=lambda: DataLoader(Drawing(), 4, shuffle=True),
                eval_dataloaders=lambda: DataLoader(Drawing(), 8, shuffle=True),
                optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            )
            settings = {"max_duration": "2ep", "checkpoint_interval": "1ba", "eval_interval": "1ba"}
            with isolated_trainer(folder, task, **settings) as trainer:
                result = trainer.fit(until=until)
        return [{**row, "seconds": None} for row in result.history]

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"

    expected = evaluated(whole, None)

    assert evaluated(stopped, "3ba", "9ba", None)[-5:] == expected[-5:]
    assert len({str(row) for row in expected}) == len(expected)


Pair = namedtuple("Pair", ["inputs", "targets"])


class Uneven(IterableDataset):
    """Has 4 samples on rank 0, and 12 on rank 1."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 4 + 8 * torch.distributed.get_rank():
            self.at += 1
            yield torch.full((3,), self.at / 12), self.at % 3
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def fit_named(folder, until=None):
    """Trains over two epochs of six batches, of which rank 0 has two; gives the weights."""

    def load():
        return StatefulDataLoader(Uneven(), 2, collate_fn=lambda some: Pair(*default_collate(some)))

    task = Task(
        model=narrow,
        loss=cross_entropy,
        train_dataloader=load,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    settings = {"max_duration": "2ep", "checkpoint_interval": "1ba"}
    with isolated_trainer(folder, task, **settings) as trainer:
        trainer.fit(until=until)
        return trainer.state.model.weight.tolist()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11
def test_a_run_whose_batches_no_checkpoint_can_hold_goes_on(tmp_path):
    """The batch that a rank repeats is left out: while it has data, another one will do."""
    expected = run_ranks(fit_named, tmp_path / "in one go")

    run_ranks(fit_named, tmp_path / "stopped", "1ba")
    run_ranks(fit_named, tmp_path / "stopped", "6ba")
    actual = run_ranks(fit_named, tmp_path / "stopped")

    assert actual == expected


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_rank_without_data_and_without_a_batch_to_repeat_is_told(tmp_path):
    """Only the end of the epoch has neither."""
    run_ranks(fit_named, tmp_path, "4ba")

    with pytest.raises(RankError, match="lacks the batch that this rank, which has no data left,"):
        run_ranks(fit_named, tmp_path)
