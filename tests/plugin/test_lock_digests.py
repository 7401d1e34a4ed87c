"""The digest of an order."""

from __future__ import annotations

import random

import pytest

from eventloop.config.option_types import Value
from eventloop.config.plugin_rules import Rules
from eventloop.plugin.lock_digests import order_digest
from eventloop.plugin.records import Plugin
from eventloop.plugin.registry import Registry, arrange


@pytest.fixture
def three(plugin) -> list[Plugin]:
    """Three plugins that meet in one hook."""
    return [plugin(name, batch_end=lambda state: None) for name in ("a", "b", "c")]


def arranged(plugins, **orders) -> Registry:
    rules = Rules(orders=({hook: Value(names, "a test") for hook, names in orders.items()},))
    registry = arrange(plugins, rules)
    assert registry.problems == ()
    return registry


def test_one_order_has_one_digest(three):
    """However the plugins were discovered."""
    shuffled = random.Random(0)
    digests = set()
    for _ in range(20):
        shuffled.shuffle(three)
        digests.add(order_digest(arranged(three).implementations))

    assert len(digests) == 1


def test_another_order_has_another_digest(three):
    """And so has another set of plugins."""
    digests = {
        order_digest(arranged(three).implementations),
        order_digest(arranged(three[:2]).implementations),
        order_digest(arranged(three, batch_end=["c", "a"]).implementations),
    }

    assert len(digests) == 3


def test_another_order_of_callbacks_has_another_digest(plugin):
    """They may watch each other's effects: a logger before the one that writes what it logs."""
    callbacks = [plugin(name, "callback", epoch_end=lambda state: None) for name in ("a", "b")]

    plain = arranged(callbacks).implementations
    edged = arranged(callbacks, epoch_end=["b", "a"]).implementations

    assert [one.plugin.name for one in edged["epoch_end"]] == ["b", "a"]
    assert order_digest(plain) != order_digest(edged)
