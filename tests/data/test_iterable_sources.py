"""Iterables of a user's own: what is read again, and what can't be kept, is said."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from eventloop.data.feed import Feed
from eventloop.distributed.processes import Processes
from eventloop.errors import TaskError

NUM_BATCHES = 6


class Stream(IterableDataset):
    """Six batches of four."""

    def __iter__(self):
        return iter(range(4 * NUM_BATCHES))


class Plain:
    """An iterable that is not a loader."""

    def __iter__(self):
        return iter(range(NUM_BATCHES))


class CountsItsEpochs:
    """A plain iterable whose order comes from how often it was gone through."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        return iter([torch.tensor([10 * self.epoch + idx]) for idx in range(NUM_BATCHES)])


def feed_of(dataloader):
    return Feed(dataloader, Processes(), sample_seed=0)


def trained(dataloader, num_batches):
    """Returns a feed that has given so many batches, over as many epochs as that takes."""
    feed = feed_of(dataloader)
    for idx in range(num_batches):
        if idx % NUM_BATCHES == 0:
            feed.start_epoch(idx // NUM_BATCHES)
        assert feed.has_next()
        feed.next()
        if idx % NUM_BATCHES == NUM_BATCHES - 1:
            assert not feed.has_next()
            feed.end_epoch()
    return feed


@pytest.mark.parametrize("stop", [4, NUM_BATCHES, 10])
def test_an_iterable_that_counts_its_epochs_goes_on_counting(stop):
    """In mid-epoch, where it is read again from the start of the epoch, and between epochs."""
    feed, resumed = trained(CountsItsEpochs(), stop), feed_of(CountsItsEpochs())
    resumed.load_state_dict(feed.state_dict())

    if stop == NUM_BATCHES:
        resumed.start_epoch(1)
    else:
        with pytest.warns(UserWarning, match=rf"^{stop % NUM_BATCHES} batches were read again"):
            assert resumed.has_next()

    expected = 10 * (stop // NUM_BATCHES + 1) + stop % NUM_BATCHES
    assert resumed.next().tolist() == [expected]


def test_an_iterable_that_counts_nothing_goes_on_between_epochs_in_silence():
    """A warning at each start would soon be read by none."""
    feed = trained(Plain(), NUM_BATCHES)

    feed_of(Plain()).load_state_dict(feed.state_dict())


def test_other_workers_of_a_stream_are_refused_in_mid_epoch():
    """They give other batches."""
    feed = trained(DataLoader(Stream(), 4), 3)

    with pytest.raises(TaskError, match=r"num_workers=0, and .* batches with 2"):
        feed_of(DataLoader(Stream(), 4, num_workers=2)).load_state_dict(feed.state_dict())
