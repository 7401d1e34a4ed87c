"""The state of a sampler: which attributes are part of it."""

from __future__ import annotations

import pytest
from torch.utils.data import Sampler

from eventloop.data.sampler_state import SamplerState, declares


class _Parent:
    shared = 1

    def method(self):
        self._made_later = 2

    @property
    def asked(self):
        return 3


def test_only_names_that_a_class_sets_are_declared():
    """A name from a file may be that of a method, or of nothing at all."""
    made = type("Child", (_Parent,), {})()
    made.given = 4

    assert all(declares(made, name) for name in ("given", "_made_later"))
    assert not any(declares(made, name) for name in ("method", "asked", "__class__", "other"))


class Counts(Sampler):
    """Counts its epochs."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        return iter(range(3))


def test_an_attribute_that_a_sampler_does_not_set_is_refused():
    """A changed checkpoint would otherwise replace any method of it."""
    sampler = Counts()
    state = SamplerState(sampler)
    list(sampler)
    assert state.state_dict()["attributes"] == {"epoch": 1}

    with pytest.raises(ValueError, match="a Counts sets no attribute '__iter__' to values"):
        state.load_state_dict({**state.state_dict(), "attributes": {"__iter__": 1}})
