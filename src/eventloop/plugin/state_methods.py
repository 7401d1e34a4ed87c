"""What a plugin keeps for a resumed run: the methods for it, and what is wrong with them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from eventloop.errors import PluginError
from eventloop.plugin.mistakes import method_of

if TYPE_CHECKING:
    from eventloop.plugin.records import Plugin

SAVE, LOAD = "state_dict", "load_state_dict"


def keeps_state(plugin: Plugin) -> bool:
    """Tells whether a plugin has a state of its own to keep.

    The methods that a module, an optimizer or a scheduler inherits from torch don't count.
    """
    return plugin.role != "core" and len(_own(plugin)) == 2


def is_per_rank(plugin: Plugin) -> bool:
    """Tells whether each rank's state is kept, or rank 0's for all."""
    return bool(getattr(plugin.target, "state_per_rank", False))


def state_misfits(plugin: Plugin) -> Iterator[PluginError]:
    """Finds what would lose a plugin's state, or fail when a run is resumed."""
    if plugin.role == "core":
        return
    own = _own(plugin)
    for what, mend, method in (*_missing(own), *_uncallable(own), *_useless(plugin, own)):
        who = f"{plugin.origin}, {method_of(plugin, method)}"
        yield PluginError(what, plugin=who, fix=plugin.fix(mend))


# What is wrong, how to mend it, and where it is.
_Misfits = Iterator[tuple[str, str, str]]


def _missing(own: dict[str, Callable[..., Any]]) -> _Misfits:
    if list(own) == [SAVE]:
        yield (
            "it has state_dict without load_state_dict, so that what it saves would never come back",
            "write `def load_state_dict(self, state, version)`",
            SAVE,
        )
    if list(own) == [LOAD]:
        yield (
            "it has load_state_dict without state_dict, so that nothing would be saved for it",
            "write `def state_dict(self)`",
            LOAD,
        )


def _uncallable(own: dict[str, Callable[..., Any]]) -> _Misfits:
    if SAVE in own and not _takes(own[SAVE], 0):
        yield "state_dict is called without arguments", "write `def state_dict(self)`", SAVE
    if LOAD in own and not _takes(own[LOAD], 2):
        yield (
            "load_state_dict is called with two arguments, the state and the version of the plugin "
            "that wrote it",
            "write `def load_state_dict(self, state, version)`",
            LOAD,
        )


def _useless(plugin: Plugin, own: dict[str, Callable[..., Any]]) -> _Misfits:
    if is_per_rank(plugin) and not own:
        yield (
            "state_per_rank=True has no effect: it keeps no state",
            "write `state_dict(self)` and `load_state_dict(self, state, version)`, or leave it out",
            "state_per_rank",
        )


def _own(plugin: Plugin) -> dict[str, Callable[..., Any]]:
    """Gives the two methods, as far as they are there and not torch's."""
    found = {name: getattr(plugin.target, name, None) for name in (SAVE, LOAD)}
    return {name: one for name, one in found.items() if callable(one) and not _is_torchs(one)}


def _is_torchs(method: Callable[..., Any]) -> bool:
    return str(getattr(method, "__module__", "")).partition(".")[0] == "torch"


def _takes(method: Callable[..., Any], number: int) -> bool:
    """Tells whether a method takes so many arguments; torch's `strict` is no version."""
    try:
        signature = inspect.signature(method)
    except ValueError:  # of some that are written in C
        return True
    try:
        given = signature.bind(*range(number)).arguments
    except TypeError:
        return False
    return "strict" not in given
