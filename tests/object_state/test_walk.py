"""Which locations a walk visits, and what it leaves alone."""

from __future__ import annotations

import argparse
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from eventloop.object_state import walk as module
from eventloop.object_state.walk import walk, where_most_are

_counts = {"calls": 0}


class Slotted:
    __slots__ = ("empty", "number")

    def __init__(self):
        self.number = 1


class Base:
    shared = [1]

    def __init__(self):
        self.slotted = Slotted()
        self.options = argparse.Namespace(rate=0.5)

    @property
    def asked(self):
        raise AssertionError("a property ran")

    def __getattr__(self, name):
        raise AssertionError(f"__getattr__ ran for {name}")

    def __eq__(self, other):
        raise AssertionError("__eq__ ran")

    def __iter__(self):
        raise AssertionError("__iter__ ran")

    def __len__(self):
        raise AssertionError("__len__ ran")

    __hash__ = None

    def count(self):
        _counts["calls"] += 1


def test_attributes_slots_classes_and_globals_are_places():
    """And no code of the objects runs."""
    locations = walk({"root": Base()}).locations

    names = {path.rpartition(":")[2] for path in locations}
    assert {"root.slotted.number", "root.options.rate", "Base.shared", "_counts"} <= names
    assert not any("root.asked" in path or "empty" in path for path in locations)


def test_an_object_is_visited_once_and_cycles_end():
    """Two attributes may share an object, and an object may refer to itself."""
    root = argparse.Namespace(first=[1])
    root.second, root.itself, root.circle = root.first, root, []
    root.circle.append(root.circle)

    result = walk({"root": root})

    assert not result.beyond
    assert result.objects["root.first"] is root.first
    assert "root.second" not in result.objects
    assert "root.itself.first" not in result.locations


def test_a_walk_is_bounded(monkeypatch):
    """What lies beyond the bound is listed, so that a change of it can be seen."""
    monkeypatch.setattr(module, "MAX_OBJECTS", 50)
    root = argparse.Namespace(parts=[argparse.Namespace(idx=idx) for idx in range(100)])

    result = walk({"root": root})

    assert len(result.objects) == 50
    assert {location.path for location in result.beyond} >= {"root.parts[60]", "root.parts[99]"}


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["a.parts[0]", "a.parts[1]", "a.parts[2].n", "a.rate"], "a.parts"),
        (["a['x y'].n", "a['x y'].m", "b"], "a['x y']"),
        (["a", "b"], ""),
        ([], ""),
    ],
)
def test_where_most_objects_are_is_a_path_that_more_than_half_begin_with(paths, expected):
    """A user looks there first."""
    assert where_most_are(paths) == expected


def test_workers_of_a_data_loader_are_not_entered():
    """They are processes, not state."""
    loader = DataLoader(TensorDataset(torch.zeros(4)), 2, num_workers=1, persistent_workers=True)
    next(iter(loader))

    paths = walk({"loader": loader}).locations

    assert not any("_iterator" in path for path in paths)


def test_the_global_generators_are_not_entered():
    """A method of theirs leads to them, and they are saved by themselves."""
    root = argparse.Namespace(
        draw=random.random, normal=np.random.normal, own=random.Random(0).random
    )

    objects = walk({"root": root}).objects.values()

    generators = [value for value in objects if isinstance(value, random.Random)]
    assert generators == [root.own.__self__]
    assert not any(isinstance(value, np.random.RandomState) for value in objects)
