"""Fixtures for the steps of a plugin's life: a State, and the plan of one hook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch

from eventloop.checkpoint.capture import Captured
from eventloop.config.settings import Settings
from eventloop.distributed.processes import Processes
from eventloop.hook_markers import hookimpl
from eventloop.plugin.declared_hooks import HOOKS
from eventloop.plugin.order import order
from eventloop.plugin.plans import ActivePlugins, Plan, freeze
from eventloop.plugin.records import FROM_ENTRY_POINT, Plugin
from eventloop.plugin.validate import implementations
from eventloop.state import State
from eventloop.training.logged_numbers import Numbers
from eventloop.training.precision import choose_precision


@pytest.fixture(scope="session")
def new_state() -> Callable[[], State]:
    """Makes the State of a run that hasn't begun."""

    def new_state() -> State:
        return State(
            settings=Settings(),
            device=torch.device("cpu"),
            precision=choose_precision("fp32", torch.device("cpu")),
            processes=Processes(),
            numbers=Numbers(Settings().log_interval),
            run_dir=Path("runs"),
            active=ActivePlugins(),
            update=lambda state, loss_fn, names: False,
            capture=lambda state: Captured({}, {}),
            criterion=None,
            duration=None,
            observers=(),
        )

    return new_state


@pytest.fixture
def state(new_state) -> State:
    """The State of a run that hasn't begun."""
    return new_state()


@pytest.fixture
def plugin() -> Callable[..., Plugin]:
    """Makes a plugin of functions: `plugin("ema", batch_end=lambda state: ...)`.

    A function stands for its hook; a pair of function and options is marked with them. The mark
    is left on a copy, so that one function may serve several plugins.
    """

    def plugin(name: str, role: str = "algorithm", distribution: str = "", **hooks: Any) -> Plugin:
        marked = {}
        for hook, given in hooks.items():
            function, options = given if isinstance(given, tuple) else (given, {})
            marked[hook] = hookimpl(**options)(_copied(function))
        version = "0.2.1" if distribution else ""
        source = FROM_ENTRY_POINT if distribution else ""
        return Plugin(name, role, SimpleNamespace(**marked), distribution, version, source)

    return plugin


def _copied(function: FunctionType) -> FunctionType:
    return FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


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


@pytest.fixture
def names_in_order() -> Callable[..., list[str]]:
    """Orders the implementations of one hook; gives their plugins' names."""

    def names_in_order(hook: str, plugins: Sequence[Plugin], order=order) -> list[str]:
        found = [each for one in plugins for each in implementations(one, HOOKS)[0]]
        return [
            each.plugin.name for each in order(each for each in found if each.hook.name == hook)
        ]

    return names_in_order
