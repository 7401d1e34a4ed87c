"""Which places a walk visits, and what it leaves alone."""

from __future__ import annotations

import argparse
import functools
import importlib
import random
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from eventloop.object_state import walk as module
from eventloop.object_state.walk import is_attribute, walk

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
    places = walk({"root": Base()}).places

    names = {path.rpartition(":")[2] for path in places}
    assert {"root.slotted.number", "root.options.rate", "Base.shared", "_counts"} <= names
    assert not any("root.asked" in path or "empty" in path for path in places)


def test_a_closure_and_what_a_function_calls_are_entered():
    """State that no attribute has: of a closure, a partial function, a bound method."""
    rng = random.Random(0)

    def draw(scale):
        return scale * rng.random()

    places = walk({"draw": functools.partial(draw, 2.0)}).places

    assert places["draw.func.<rng>"].value is rng
    assert places["draw.args"].value == (2.0,)


def test_an_object_is_visited_once_and_cycles_end():
    """Two attributes may share an object, and an object may refer to itself."""
    root = argparse.Namespace(first=[1])
    root.second, root.itself, root.circle = root.first, root, []
    root.circle.append(root.circle)

    result = walk({"root": root})

    assert result.is_complete
    assert result.objects["root.first"] is root.first
    assert "root.second" not in result.objects
    assert "root.itself.first" not in result.places


def test_a_walk_is_bounded(monkeypatch):
    """A data set of a million objects costs no more than one of the bound."""
    monkeypatch.setattr(module, "MAX_OBJECTS", 50)
    root = argparse.Namespace(parts=[argparse.Namespace(idx=idx) for idx in range(100)])

    result = walk({"root": root})

    assert not result.is_complete
    assert len(result.objects) <= 50


def test_a_module_shows_what_its_state_dict_leaves_out():
    """And weights: a module that no other module has registered isn't in a state_dict."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].register_buffer("mean", torch.zeros(2), persistent=False)
    model.num_steps = 3

    paths = walk({"model": model}).places

    assert {"model.num_steps", "model.0.mean", "model.1.training"} <= paths.keys()
    assert {"model.0.weight", "model.1.running_mean"} <= paths.keys()
    assert not any("_hooks" in path for path in paths)


def test_a_compiled_module_has_the_paths_of_the_plain_one():
    """A run may be resumed with or without compilation."""
    model = nn.Sequential(nn.Linear(2, 2))
    compiled = torch.compile(model)

    assert walk({"model": compiled}).places.keys() == walk({"model": model}).places.keys()


def test_workers_of_a_data_loader_are_not_entered():
    """They are processes, not state."""
    loader = DataLoader(TensorDataset(torch.zeros(4)), 2, num_workers=1, persistent_workers=True)
    next(iter(loader))

    paths = walk({"loader": loader}).places

    assert not any("_iterator" in path for path in paths)


@pytest.mark.parametrize("name", ["asked", "count", "__class__", "not a name"])
def test_a_name_that_would_hide_code_is_no_attribute(name):
    """It may come from a file."""
    assert not is_attribute(Base(), name)


@pytest.mark.parametrize("name", ["late", "shared"])
def test_a_name_that_hides_no_code_is_an_attribute(name):
    """A value of the class is hidden as `self.shared = ...` would hide it."""
    assert is_attribute(Base(), name)


def test_the_global_generators_are_not_entered():
    """A method of theirs leads to them, and they are saved by themselves."""
    root = argparse.Namespace(
        draw=random.random, normal=np.random.normal, own=random.Random(0).random
    )

    objects = walk({"root": root}).objects.values()

    generators = [value for value in objects if isinstance(value, random.Random)]
    assert generators == [root.own.__self__]
    assert not any(isinstance(value, np.random.RandomState) for value in objects)


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_package_is_the_users_unless_it_is_installed(is_installed, tmp_path, monkeypatch):
    """Into any folder, also one that pip has filled with --target."""
    package = tmp_path / f"of_somebody_{is_installed}"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "inner" / "__init__.py").touch()
    (package / "inner" / "code.py").touch()
    if is_installed:
        (tmp_path / "of_somebody-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)

    for name in (package.name, f"{package.name}.inner", f"{package.name}.inner.code"):
        importlib.import_module(name)
        assert module.is_own_code(name) is not is_installed
        monkeypatch.delitem(sys.modules, name)
