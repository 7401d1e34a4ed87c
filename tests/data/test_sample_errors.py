"""A sample that can't be read is named by its index, however the data set is read."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from eventloop.data.sample_errors import NamedSamples

BROKEN = 13


class Files(Dataset):
    """Of which one can't be read."""

    def __init__(self, length=20):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index == BROKEN:
            raise ValueError("the file is damaged")
        return torch.ones(3), torch.ones(3)


class Batched(Files):
    """Reads a batch at once."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Drawing(Files):
    """Draws random numbers, so that its samples are seeded."""

    def __getitem__(self, index):
        torch.rand(1)
        return super().__getitem__(index)


def text_of(error) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("seed_samples", [True, False])
@pytest.mark.parametrize("kind", [Files, Drawing])
def test_the_sample_that_fails_in_training_is_named(
    kind, seed_samples, num_workers, make_trainer, make_task
):
    """A batch has many samples, and the order of an epoch is shuffled."""
    loader = DataLoader(kind(), 4, shuffle=True, num_workers=num_workers)
    trainer = make_trainer(
        make_task(train_dataloader=loader), seed_samples=seed_samples, max_duration="2ep"
    )

    with pytest.raises(ValueError, match="the file is damaged") as caught:
        trainer.fit()

    expected = f"raised by the data set {kind.__name__} for the sample at index {BROKEN}"
    assert text_of(caught.value).count(expected) == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_sample_that_fails_in_an_evaluation_is_named(num_workers, make_trainer, make_task):
    """Eval data is read in the order of the data set, but a batch doesn't say which sample it was."""
    loaders = {"test": DataLoader(Files(), 8, num_workers=num_workers)}
    trainer = make_trainer(make_task(eval_dataloaders=loaders))

    with pytest.raises(ValueError, match="the file is damaged") as caught:
        trainer.eval()

    assert f"for the sample at index {BROKEN}" in text_of(caught.value)
    assert "eval data loader 'test', at its batch 2" in text_of(caught.value)


def test_of_a_batch_that_is_read_at_once_all_indices_are_named(make_trainer, make_task):
    """Which of them failed, the data set alone knows."""
    trainer = make_trainer(make_task(train_dataloader=DataLoader(Batched(), 4)))

    with pytest.raises(ValueError, match="damaged") as caught:
        trainer.fit()

    assert "raised by the data set Batched for the samples at 12, 13, 14, 15" in text_of(
        caught.value
    )


def test_of_a_large_batch_the_first_indices_are_named():
    """A message isn't a list of thousands of numbers."""
    with pytest.raises(ValueError, match="damaged") as caught:
        NamedSamples(Batched(), in_batches=True).__getitems__(range(12, 30))

    assert text_of(caught.value).endswith("at 12, 13, 14, 15, 16, 17, 18, 19 and 10 more")


def test_the_index_of_a_subset_is_that_of_the_loader(make_trainer, make_task):
    """It is the index that the sampler gave, into the data set that the user gave."""
    part = Subset(Files(), [1, BROKEN])
    trainer = make_trainer(make_task(train_dataloader=DataLoader(part, 2)))

    with pytest.raises(ValueError, match="damaged") as caught:
        trainer.fit()

    assert "raised by the data set Subset for the sample at index 1" in text_of(caught.value)


def test_samples_that_can_be_read_are_those_of_the_data_set():
    """Attributes, length and a copy in another process are as they were."""
    named = pickle.loads(pickle.dumps(NamedSamples(Files(7), in_batches=False)))

    assert (len(named), named.length) == (7, 7)
    assert torch.equal(named[3][0], torch.ones(3))
    assert len(named.__getitems__([0, 1, 2])) == 3
