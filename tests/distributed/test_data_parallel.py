"""DistributedDataParallel as the loop uses it."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Task, hookimpl
from eventloop_testing import isolated_trainer, run_ranks

X = torch.randn(160, 8, generator=torch.Generator().manual_seed(0))
Y = X.argmax(1)


def train(folder, batches):
    """Trains so many batches of a run on this rank; gives the weights."""
    task = Task(
        model=lambda: nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(3))
        ),
        loss=cross_entropy,
        train_dataloader=DataLoader(TensorDataset(X, Y), 2, shuffle=True),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    )
    settings = {"checkpoint_interval": "4ba", "max_duration": "20ba"}
    with isolated_trainer(folder, task, **settings) as trainer:
        trainer.fit(until=f"{batches}ba")
        return nn.utils.parameters_to_vector(trainer.state.model.parameters()).detach()


@pytest.mark.nightly
def test_four_ranks_go_on_with_the_same_bits(tmp_path):
    """The order in which ranks' gradients are added up follows from their place in a bucket."""
    whole = run_ranks(train, tmp_path / "whole", 20, world_size=4)
    run_ranks(train, tmp_path / "parts", 7, world_size=4)

    found = run_ranks(train, tmp_path / "parts", 20, world_size=4)

    for one, other in zip(whole, found, strict=True):
        assert torch.equal(one, other)


class Words(nn.Module):
    """A table with sparse gradients beside a layer, and one that isn't trained."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 3, sparse=True)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.head = nn.Linear(3, 8)

    def forward(self, inputs):
        return self.head(self.frozen(self.table(inputs)))


@pytest.mark.about_cpu  # the pretend accelerator has no sparse tensors
def test_sparse_gradients_and_frozen_parameters_train_as_in_one_process(tmp_path):
    def train(batch_size=4):
        task = Task(
            model=Words,
            loss=cross_entropy,
            train_dataloader=DataLoader(TensorDataset(Y, Y), batch_size),
            optimizer=lambda model: torch.optim.SGD(
                [one for one in model.parameters() if one.requires_grad], lr=0.1
            ),
        )
        with isolated_trainer(tmp_path / os.environ.get("RANK", "alone"), task) as trainer:
            assert all(one.grad is None for one in trainer.state.model.parameters())
            trainer.fit()
            return nn.utils.parameters_to_vector(trainer.state.model.parameters()).detach()

    whole = train(8)

    for found in run_ranks(train):
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-6)


def test_what_ranks_log_is_averaged_or_added_up(tmp_path):
    """A sum, of tokens say, is that of all ranks; a mean is that over them."""

    class Logs:
        name = "logs"
        numbers = None

        @hookimpl
        def batch_end(self, state):
            state.log("logs/sum", 1 + state.rank, "sum")
            state.log("logs/mean", 1 + state.rank, "mean")

        @hookimpl
        def log(self, numbers):
            self.numbers = numbers

    def logged():
        logs = Logs()
        with isolated_trainer(tmp_path, max_duration="1ba", callbacks=[logs]) as trainer:
            trainer.fit()
        return logs.numbers

    numbers, _ = run_ranks(logged)

    assert (numbers["logs/sum"], numbers["logs/mean"]) == (3, 1.5)
