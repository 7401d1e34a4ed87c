"""Loaders with a state of their own: what they draw when they go on."""

from __future__ import annotations

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from eventloop.data.combined import cycled
from eventloop.data.feed import Feed
from eventloop.data.loaders import loader_of
from eventloop.distributed.processes import Processes

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11
NUM_BATCHES = 6


def feed_of(dataloader):
    return Feed(dataloader, Processes(), sample_seed=0)


def taken(feed, num_batches, epoch=0):
    """Takes so many batches of an epoch, which begins if none has."""
    if not feed.under_way:
        feed.start_epoch(epoch)
    return [str(feed.next()) for _ in range(num_batches) if feed.has_next()]


class Wraps:
    """A loader whose iterator is a generator: its workers' seed is drawn when the first batch is wanted."""

    def __init__(self, num_workers):
        self.loader = StatefulDataLoader(range(24), 4, num_workers=num_workers)

    def __iter__(self):
        for batch in self.loader:
            yield batch, torch.rand(())

    def state_dict(self):
        return self.loader.state_dict()

    def load_state_dict(self, state):
        self.loader.load_state_dict(state)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_generator_that_begins_once_more_draws_no_other_numbers(num_workers):
    """The seed of its workers isn't drawn again; what it draws for a batch is drawn as without a stop."""
    feed = feed_of(Wraps(num_workers))
    taken(feed, 2)
    state, rng_state = feed.state_dict(), torch.get_rng_state()
    whole = [taken(feed, 1), torch.rand(())]
    resumed = feed_of(Wraps(num_workers))
    resumed.load_state_dict(state)
    torch.set_rng_state(rng_state)

    assert [taken(resumed, 1), torch.rand(())] == whole


class DrawsASeed:
    """A loader that says where it is: at the end of an epoch, at its end, from where it yields nothing."""

    def __init__(self):
        self.load_state_dict({"at": 0})

    def __iter__(self):
        torch.empty((), dtype=torch.int64).random_()
        start, self.start = self.start, 0
        for self.at in range(start + 1, NUM_BATCHES + 1):
            yield [self.at]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = self.start = state["at"]


def test_a_loader_that_was_loaded_at_its_end_draws_one_seed_for_the_next_epoch():
    """It is begun twice: the first time it yields nothing."""
    feed = feed_of(DrawsASeed())
    taken(feed, NUM_BATCHES)
    assert not feed.has_next()
    feed.end_epoch()
    state, rng_state = feed.state_dict(), torch.get_rng_state()
    whole = [taken(feed, 1, epoch=1), torch.rand(())]
    resumed = feed_of(DrawsASeed())
    resumed.load_state_dict(state)
    torch.set_rng_state(rng_state)

    assert [taken(resumed, 1, epoch=1), torch.rand(())] == whole


def test_a_repeated_loader_goes_on_with_its_pass():
    """The number of the pass decides the order of a shuffled loader, whatever the epoch is."""
    source = loader_of(cycled([1, 2, 3])).source(Processes(), 0)
    batches = source.batches(0)
    for _ in range(5):
        next(batches)
    saved = source.state_dict(5)

    resumed = loader_of(cycled([1, 2, 3])).source(Processes(), 0)
    resumed.load_state_dict(saved, 0, 5)

    assert (saved["pass_idx"], saved["num_in_pass"]) == (1, 2)
    assert resumed.state_dict(5) == saved
    assert [next(resumed.batches(0, 5)) for _ in range(2)] == [3, 1]
