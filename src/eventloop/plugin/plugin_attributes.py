"""The attributes with which a plugin's class or module describes it."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class PluginFacts:
    """The attributes of a plugin besides its hooks and state; "Write a plugin" explains them."""

    name: str = ""
    requires: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    hookspecs: Any = None
    removed_hooks: Mapping[str, str] | None = None
    wakes_with: tuple[str, ...] = ()
    off_until_named: bool = False
    free_options: tuple[str, ...] = ()
    state_per_rank: bool = False
    around_calls: Callable[[str, str, Any], AbstractContextManager[object]] | None = None
    start_early: Callable[[], object] | None = None
    needs_eval_data: bool = False
    shows_progress: bool = False
    takes_turns: str = ""
    stops_runs: bool | None = None
    loss_splits: bool = True
    loss_may_broadcast: bool = False
    default_settings: Mapping[str, Any] | None = None


_DEFAULTS: dict[str, Any] = {fact.name: fact.default for fact in dataclasses.fields(PluginFacts)}
_METHODS = ("around_calls", "start_early")
_DISTINCT = [name for name in _DEFAULTS if name != "name"]  # a plugin may have `names`
# Cached, because plugins share most attribute names and a comparison takes 100 us.
_near = cache(partial(difflib.get_close_matches, possibilities=_DISTINCT, n=1, cutoff=0.9))


def facts_of(target: object) -> PluginFacts:
    """Reads the facts of a class, an instance or a module; a string counts as a tuple of length 1."""
    values = {name: getattr(target, name, default) for name, default in _DEFAULTS.items()}
    for name in ("requires", "conflicts", "wakes_with", "free_options"):
        values[name] = (values[name],) if isinstance(values[name], str) else tuple(values[name])
    return PluginFacts(**values)


def misspelt_facts(target: object) -> Iterator[tuple[str, str]]:
    """Yields misspelt attributes, each with the closest fact.

    Options, other methods and imported names aren't checked.
    """
    init = type(target).__init__
    for namespace in (
        [target] if isinstance(target, ModuleType | type) else type(target).__mro__[:-1]
    ):
        for name, value in vars(namespace).items():
            if name in _DEFAULTS or not (near := _near(name)):
                continue
            options = inspect.signature(init).parameters if inspect.isfunction(init) else ()
            is_imported = str(getattr(value, "__module__", "")).startswith("eventloop.")
            is_method = inspect.isroutine(value) or inspect.isdatadescriptor(value)
            if is_method == (near[0] in _METHODS) and name not in options and not is_imported:
                yield name, near[0]
