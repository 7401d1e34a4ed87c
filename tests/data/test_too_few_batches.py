"""Errors of loaders without batches say which of two reasons it is."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from eventloop.data import cycled
from eventloop.data.loaders import loader_of
from eventloop.data.too_few_batches import no_batch_in_epoch, nothing_to_repeat, too_few

DROPPED = DataLoader(range(3), 4, drop_last=True)


@pytest.mark.parametrize("dataloader", [DROPPED, cycled(DROPPED)])
def test_samples_that_drop_last_drops_are_named(dataloader):
    """With their number and the size of a batch."""
    error = no_batch_in_epoch(loader_of(dataloader), 2)

    assert "epoch 3" in str(error)
    assert "fewer than 4 samples, and there are 3: use a smaller batch_size" in error.fix


def test_any_other_loader_is_used_up():
    """An iterator says nothing of why it has ended."""
    assert "used up after one pass" in nothing_to_repeat(loader_of(iter([]))).fix


def test_a_wrong_length_is_named():
    """A data set that raises StopIteration ends the data early."""
    assert "the train data loader yielded 1 batch, but its length is 3" in str(
        too_few("train data loader", 1, 3)
    )
