"""The feed: how batches are taken from a loader, in one process."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from eventloop.errors import TaskError
from eventloop.feed import Feed
from eventloop.processes import SingleProcess


def feed_of(dataloader):
    return Feed(dataloader, SingleProcess())


class Stream(IterableDataset):
    """An iterable data set that promises more than it gives, as those of several workers do."""

    def __len__(self):
        return 100

    def __iter__(self):
        return iter(range(3))


class Lazy:
    def __iter__(self):
        return iter("abc")


LOADERS = {
    "list": lambda: ["a", "b", "c"],
    "loader": lambda: DataLoader(TensorDataset(torch.arange(3))),
    "stream": lambda: DataLoader(Stream(), batch_size=1),
    "iterable": Lazy,
    "generator": lambda: (one for one in "abc"),
}


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_a_feed_gives_every_batch_once(make):
    """Whether the loader knows its length or not."""
    feed, given = feed_of(make()), 0
    feed.start_epoch(0)

    while feed.has_next():
        feed.next()
        given += 1
    feed.end_epoch()

    assert given == 3
    assert not feed.under_way


@pytest.mark.parametrize("name", ["list", "loader", "stream", "iterable"])
def test_a_feed_begins_anew_each_epoch(name):
    """Also after one that was left in the middle."""
    feed, first = feed_of(LOADERS[name]()), []

    for epoch in range(2):
        feed.start_epoch(epoch)
        first.append(feed.next())
        feed.end_epoch()

    assert first[0] == first[1]


def test_a_length_that_can_be_relied_on_is_known():
    """An iterable data set may break its word; `len` of it is a guess."""
    known = {name: feed_of(make()).num_batches for name, make in LOADERS.items()}

    assert known == {"list": 3, "loader": 3, "stream": None, "iterable": None, "generator": None}


def test_a_loader_that_knows_its_length_is_asked_when_a_batch_is_wanted():
    """Not before: what is fetched ahead is the loader's business."""
    taken = []

    class Watched(Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, idx):
            taken.append(idx)
            return idx

    feed = feed_of(DataLoader(Watched(), batch_size=None))
    feed.start_epoch(0)

    assert feed.has_next()
    assert taken == []
    feed.next()
    assert taken == [0]


def test_a_loader_shorter_than_it_said_is_named():
    """Rather than a StopIteration from the depths."""

    class Wrong(Lazy, list):
        def __len__(self):
            return 5

        __iter__ = Lazy.__iter__

    feed = feed_of(Wrong())
    feed.start_epoch(0)
    for _ in range(3):
        feed.next()

    with pytest.raises(TaskError, match="gave 3 batches, but its length is 5"):
        feed.next()


def test_a_sampler_is_told_the_epoch():
    """A distributed sampler shuffles by it."""
    epochs = []
    loader = DataLoader(TensorDataset(torch.arange(3)))
    loader.sampler.set_epoch = epochs.append

    feed = feed_of(loader)
    for epoch in (0, 7):
        feed.start_epoch(epoch)

    assert epochs == [0, 7]


@pytest.mark.parametrize("empty", [[], iter([])])
def test_an_epoch_without_a_batch_is_refused(empty):
    """A generator that is used up would let epochs pass untrained, or for ever."""
    with pytest.raises(TaskError, match=r"gave no batch in epoch 2[\s\S]*a generator is used up"):
        feed_of(empty).start_epoch(2)
