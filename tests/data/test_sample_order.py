"""The order of an epoch is drawn once more, and compared with the one that it began with."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from eventloop.data.feed import Feed
from eventloop.distributed.processes import Processes
from eventloop.errors import TaskError


class Interleaving(Sampler):
    """Draws each index from the generator that the training draws from in between."""

    def __len__(self):
        return 24

    def __iter__(self):
        for _ in range(24):
            yield int(torch.randint(24, ()))


def make_feed():
    loader = DataLoader(range(24), 4, sampler=Interleaving())
    return Feed(loader, Processes(), sample_seed=0)


def test_an_order_that_cannot_be_drawn_again_is_refused():
    """The training's draws are part of it; to go on with another order would go unnoticed."""
    feed = make_feed()
    feed.start_epoch(0)
    for _ in range(3):
        assert feed.has_next()
        feed.next()
        torch.rand(2)

    with pytest.raises(
        TaskError, match=r"Interleaving\) differs from .* 3 batches were trained on"
    ):
        make_feed().load_state_dict(feed.state_dict())
