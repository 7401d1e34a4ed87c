"""Names of tasks without one: what runs/ calls their folders."""

from __future__ import annotations

import functools
import sys
from types import ModuleType, SimpleNamespace

import pytest
from torch import nn

from eventloop.task.default_name import name_of_hooks, name_of_model, name_of_program


class TinyNet(nn.Linear):
    """A model."""

    def __init__(self, size=3):
        super().__init__(size, size)


def make_net():
    """Returns a model."""
    return TinyNet()


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (TinyNet(), "tiny-net"),
        (TinyNet, "tiny-net"),
        (functools.partial(TinyNet, 4), "tiny-net"),
        (make_net, "make_net"),
        (functools.partial(functools.partial(make_net)), "make_net"),
    ],
)
def test_a_model_or_its_function_names_the_task(model, name):
    """A folder of many projects called runs/task tells none from another."""
    assert name_of_model(model) == name


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(1, 1)), lambda: TinyNet()])
@pytest.mark.parametrize(
    ("attributes", "name"),
    [
        ({"__file__": "/home/me/digits.py"}, "digits"),
        ({"__file__": "/home/me/package/__main__.py"}, "package"),
        ({"__vsc_ipynb_file__": "/home/me/first try.ipynb"}, "first-try"),
        ({}, "task"),
    ],
)
def test_a_model_without_a_name_leaves_it_to_the_program(model, attributes, name, monkeypatch):
    """Half of all models are a Sequential in a lambda."""
    main = ModuleType("__main__")
    vars(main).update(attributes)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)

    assert name_of_model(model) == name


def test_a_notebook_of_jupyter_is_known_by_its_path(monkeypatch):
    """Its kernel has no file; the server tells it which notebook it is for."""
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/me/Digits, again.ipynb")

    assert name_of_program() == "Digits-again"


def test_objects_and_modules_of_hooks_have_names_too():
    """They take no name as an argument."""
    assert name_of_hooks(ModuleType("tasks.charlm")) == "charlm"
    assert name_of_hooks(SimpleNamespace()) == "simple-namespace"


def test_the_folder_of_a_run_has_the_name(make_trainer, make_task):
    """A name that was given comes first."""
    named = make_trainer(make_task(model=make_net, name="mine"))
    unnamed = make_trainer(make_task(model=make_net))

    assert named.state.run_dir.parts[:2] == ("runs", "mine")
    assert unnamed.state.run_dir.parts[:2] == ("runs", "make_net")
