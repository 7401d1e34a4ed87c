"""Plugins of which one acts on each batch."""

from __future__ import annotations

import pytest

from eventloop import hookimpl
from eventloop.toolbox import owns_batch
from eventloop_testing import tiny_batches, tiny_task


class Takes:
    """Lists the batches that are its own."""

    def __init__(self, name, kind="blend"):
        self.name = name
        self.takes_turns = kind
        self.batches = []

    @hookimpl
    def batch_start(self, state):
        if owns_batch(state, self):
            self.batches.append(state.clock.batch)


@pytest.fixture
def turns(make_trainer):
    """Trains for 60 batches; gives those of each plugin, by name."""

    def turns(*plugins, **settings):
        task = tiny_task(train_dataloader=tiny_batches(60))
        make_trainer(task, algorithms=plugins, **settings).fit()
        return {plugin.name: plugin.batches for plugin in plugins}

    return turns


def test_each_batch_is_one_plugins(turns):
    """None is left out, none is worked on twice, and none has much more than its share."""
    found = turns(Takes("a"), Takes("b"), Takes("c"))

    assert sorted(batch for batches in found.values() for batch in batches) == list(range(60))
    assert all(10 <= len(batches) <= 30 for batches in found.values())


def test_the_order_of_installation_changes_no_turn(turns):
    """Nor does who asks first."""
    assert turns(Takes("a"), Takes("b")) == turns(Takes("b"), Takes("a"))


def test_another_seed_draws_other_turns(turns):
    """Or seeds wouldn't show how much depends on the draw."""
    assert turns(Takes("a"), Takes("b"))["a"] != turns(Takes("a"), Takes("b"), seed=1)["a"]


def test_who_shares_with_nobody_has_every_turn(turns):
    """Another kind takes other turns."""
    found = turns(Takes("a"), Takes("b", kind="crop"))

    assert found == {"a": list(range(60)), "b": list(range(60))}
