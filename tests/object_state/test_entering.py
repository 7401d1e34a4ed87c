"""Which objects a walk enters."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import types
from collections import deque
from decimal import Decimal

import numpy as np
import pytest
import torch

from eventloop.object_state.entering import (
    has_identity,
    is_entered,
    is_own_code,
    is_value_container,
)


class Own:
    def __init__(self):
        self.count = 0


@pytest.mark.parametrize(
    "value", [Own(), [Own()], types.SimpleNamespace(), lambda: 0, Own().__init__]
)
def test_objects_and_code_of_the_user_are_entered(value):
    """Their state is in attributes, entries and closures."""
    assert is_entered(value)


@pytest.mark.parametrize(
    "value",
    [1, [1, (2, 3)], torch.zeros(2), np.zeros(2), threading, logging.getLogger(), Decimal(1)],
)
def test_values_modules_and_handles_are_not_entered(value):
    """They are saved as a whole, or not at all."""
    assert not is_entered(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([], True),
        (deque(), True),
        (np.zeros(1), True),
        (torch.zeros(1), True),
        ((), False),
        (1, False),
    ],
)
def test_mutable_values_have_an_identity(value, expected):
    """Two names of a list are two names of the same contents."""
    assert has_identity(value) is expected


def test_a_tuple_of_objects_in_a_list_is_no_value():
    """The objects in it have state of their own."""
    assert is_value_container([(1, "a"), frozenset({2})])
    assert not is_value_container([(1, Own())])


def test_installed_modules_are_not_the_users():
    """Their globals and classes aren't state of a run."""
    assert is_own_code(__name__)
    assert not any(map(is_own_code, ["torch.nn", "numpy", "collections", "eventloop.loop"]))


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
        assert is_own_code(name) is not is_installed
        monkeypatch.delitem(sys.modules, name)


def test_a_module_that_fsdp_has_given_another_class_is_entered():
    """What it keeps beside its parameters would be lost."""
    sharded = type("FSDPLinear", (torch.nn.Linear,), {"__module__": "torch.distributed.fsdp"})

    assert is_entered(sharded(1, 1))
