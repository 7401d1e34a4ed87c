"""Batches that a stream has yielded ahead of training are in the checkpoint: they may have been drawn."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

from eventloop import Task

DRAWS = {
    "torch": lambda: torch.rand(3),
    "numpy": lambda: torch.from_numpy(np.random.rand(3)).float(),
    "random": lambda: torch.tensor([random.random() for _ in range(3)]),
}


class Drawn(IterableDataset):
    """Draws its samples from a global generator, between which dropout draws from torch's."""

    def __init__(self, kind):
        self.kind = kind

    def __iter__(self):
        for _ in range(24):
            inputs = DRAWS[self.kind]()
            yield inputs, inputs.argmax()


class ReadsOneAhead:
    """Knows which batch is the last, as some frameworks have to."""

    def __init__(self, loader):
        self.loader = loader
        self.ahead = []

    def __iter__(self):
        batches = iter(self.loader)
        self.ahead = [next(batches, None)]
        while self.ahead and self.ahead[0] is not None:
            batch = self.ahead.pop()
            self.ahead = [next(batches, None)]
            yield batch


def plain(kind, num_workers=0):
    return DataLoader(Drawn(kind), batch_size=4, num_workers=num_workers)


def with_workers(kind):
    return plain(kind, num_workers=2)


def read_ahead(kind):
    return ReadsOneAhead(plain(kind))


@pytest.fixture
def inputs_of(make_trainer, tmp_path):
    """Trains in as many processes as there are times; returns the inputs of all batches."""

    def inputs_of(folder, make_loader, *untils):
        seen = []

        def forward(model, inputs):
            if model.training:
                seen.append(inputs.sum().item())
            return model(inputs)

        for until in untils:
            task = Task(
                model=lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 3)),
                loss=cross_entropy,
                forward=forward,
                train_dataloader=make_loader,
                optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            )
            trainer = make_trainer(task, max_duration="3ep", run_dir=tmp_path / folder)
            trainer.fit(until=until)
            trainer.close()
        return seen, trainer.state.model[0].weight.tolist()

    return inputs_of


@pytest.mark.filterwarnings("ignore:the train data loader is a")
@pytest.mark.filterwarnings("ignore:.*were read again to resume in mid-epoch")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("untils", [["4ba", None], ["1ba", "2ba", None], ["7ba", "9ba", None],
                                    ["6ba", None], ["11ba", None]])  # fmt: skip
@pytest.mark.parametrize("make", [plain, with_workers, read_ahead])
@pytest.mark.parametrize("kind", DRAWS)
def test_a_stream_that_draws_continues_with_the_batches_that_it_had_drawn(
    kind, make, untils, inputs_of
):
    """The end of a fit looks whether there is a next batch; drawn again, it would be another one."""

    def make_loader():
        return make(kind)

    expected = inputs_of("whole", make_loader, None)

    assert inputs_of("stopped", make_loader, *untils) == expected
