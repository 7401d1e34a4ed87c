"""Fixtures for the steps of a plugin's life: a State, and the plan of one hook."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eventloop.distributed import SingleProcess
from eventloop.hooks import hookimpl
from eventloop.plugin.freeze import Plan, freeze
from eventloop.plugin.manager import HOOKS
from eventloop.plugin.order import order
from eventloop.plugin.records import Plugin
from eventloop.plugin.validate import implementations
from eventloop.precision import FullPrecision
from eventloop.settings import Settings
from eventloop.state import State


@pytest.fixture(scope="session")
def new_state() -> Callable[[], State]:
    """Makes the State of a run that hasn't begun."""

    def new_state() -> State:
        return State(
            settings=Settings(),
            device=torch.device("cpu"),
            precision=FullPrecision(),
            processes=SingleProcess(),
            run_dir=Path("runs"),
        )

    return new_state


@pytest.fixture
def state(new_state) -> State:
    """The State of a run that hasn't begun."""
    return new_state()


@pytest.fixture
def plugin() -> Callable[..., Plugin]:
    """Makes a plugin of functions: `plugin("ema", batch_end=lambda state: ...)`.

    A function stands for its hook; a pair of function and options is marked with them.
    """

    def plugin(
        name: str, role: str = "algorithm", distribution: str = "", **hooks: Any
    ) -> Plugin:
        marked = {}
        for hook, given in hooks.items():
            function, options = given if isinstance(given, tuple) else (given, {})
            marked[hook] = hookimpl(**options)(function)
        version = "0.2.1" if distribution else ""
        return Plugin(name, role, SimpleNamespace(**marked), distribution, version)

    return plugin


@pytest.fixture
def plan_of(state) -> Callable[..., Plan]:
    """Freezes one hook of some plugins, as the trainer does."""

    def plan_of(hook: str, *plugins: Plugin) -> Plan:
        found = []
        for one in plugins:
            here, problems = implementations(one, HOOKS)
            assert problems == []
            found += [each for each in here if each.hook.name == hook]
        return freeze(HOOKS[hook], order(found), state)

    return plan_of
