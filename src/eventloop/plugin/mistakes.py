"""What a plugin has that would never be used: unmarked functions, lost states, misspelt attributes.

What is marked as a hook, `validate.py` checks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import Any

from eventloop.errors import PluginError, a
from eventloop.hook_markers import OF_ITSELF, PROJECT, Hook
from eventloop.plugin.plugin_attributes import misspelt_facts
from eventloop.plugin.records import Plugin
from eventloop.vocabulary import HOOK_WORDS

# What a method of any class may be called stays out: a model has a `train_dataloader`, say.
CALLED_BY_OTHERS = {
    name: here
    for name, here in HOOK_WORDS.items()
    if name.startswith("on_") or name.endswith("_step")
}

# What is wrong, how to fix it, and where it is.
_Misfits = Iterator[tuple[str, str, str]]


def mistakes(plugin: Plugin, hooks: Mapping[str, Hook]) -> Iterator[PluginError]:
    """Finds what a plugin has for the core that would never be called, read or saved."""
    if plugin.role == "core":
        return
    for what, fix, name in (*never_called(plugin, hooks), *_state_misfits(plugin)):
        yield plugin.problem(what, fix, method_of(plugin, name))
    for name, fact in misspelt_facts(plugin.target):
        what = f"no attribute of plugins is named {name!r}; the closest is {fact!r}"
        yield plugin.problem(what, "rename it")


def never_called(plugin: Plugin, hooks: Mapping[str, Hook]) -> _Misfits:
    """Finds functions meant as hook implementations that pluggy doesn't recognise."""
    target = plugin.target
    own = target if isinstance(target, ModuleType) else type(target)
    yield from _unmarked(own, hooks)
    for name, function in vars(own).items():
        is_meant = name in CALLED_BY_OTHERS and inspect.isfunction(function)
        if is_meant and not hasattr(function, f"{PROJECT}_impl"):
            yield (
                f"{name} is a hook of another trainer, and would never be called; here it is "
                f"{CALLED_BY_OTHERS[name]}",
                "give it that name under @hookimpl, or another one",
                name,
            )
    attributes = getattr(target, "__dict__", {})
    for name in attributes if own is not target else ():
        if name in hooks and hasattr(getattr(own, name, None), f"{PROJECT}_impl"):
            yield (
                f"the attribute {name} hides the hook method of the same name",
                "give the attribute another name",
                name,
            )
    for name, value in {**attributes, **vars(own)}.items():
        function = getattr(value, "fget", None) or getattr(value, "func", None)
        is_descriptor = hasattr(type(value), "__get__")
        is_computed = own is not target and is_descriptor and name in vars(own)
        is_computed &= not isinstance(
            value, FunctionType | staticmethod | classmethod | MemberDescriptorType
        )
        is_meant = is_computed and (name in hooks or hasattr(function, f"{PROJECT}_impl"))
        if is_meant or (name in OF_ITSELF and value is not None and not is_descriptor):
            yield (
                f"{name} is {a(type(value).__name__)}, not a method, so it would never be called",
                "make it a method under @hookimpl, or rename it",
                name,
            )


def _unmarked(own: Any, hooks: Mapping[str, Hook]) -> _Misfits:
    """Finds functions with a hook's name and signature, but without the marker."""
    # An nn.Module's forward is its own affair.
    is_module = any(base.__module__.startswith("torch.nn.") for base in getattr(own, "__mro__", ()))
    module = own.__name__ if isinstance(own, ModuleType) else own.__module__
    for name, function in vars(own).items():
        is_own = inspect.isfunction(function) and function.__module__ == module
        is_marked = hasattr(function, f"{PROJECT}_impl") or hasattr(function, f"{PROJECT}_spec")
        if name not in hooks or not is_own or is_marked or (is_module and name == "forward"):
            continue
        parameters = [one for one in inspect.signature(function).parameters if one != "self"]
        if not parameters or parameters[0] == "state":
            yield (
                f"{name} is the name of a hook, but this function isn't marked, so it would "
                "never be called",
                "put @hookimpl above it, or rename it",
                name,
            )


def without_hooks(plugin: Plugin) -> PluginError:
    """Returns the problem with a plugin without hooks: what it is, and what may have been meant."""
    target = plugin.target
    what = a(type(target).__name__)
    fix = "give it methods under @hookimpl; `eventloop plugins hooks` lists them"
    if isinstance(target, ModuleType):
        what = "a module"
        if classes := list(_classes_with_hooks(target)):
            label = plugin.source if plugin.found and plugin.found.path else target.__name__
            named = [f"{label}:{name}" for name in classes]
            by_flag = plugin.found is not None and plugin.found.by_flag
            meant = [f"`-p {name}`" if by_flag else f'"{name}"' for name in named]
            fix = f"name a class in it: {' or '.join(meant)}"
    elif inspect.isroutine(target):
        what = f"the function {getattr(target, '__name__', target)!r}"
        fix = "name a class, an instance or a module with functions under @hookimpl"
    what = f"{plugin.name} implements no hook, so that it would do nothing: it is {what}"
    return plugin.problem(what, fix)


def method_of(plugin: Plugin, method: str) -> str:
    """Returns a method's name for messages: `method Ema.batch_end`."""
    target = plugin.target
    kind = getattr(target, "__name__", None) or type(target).__name__
    return f"method {kind}.{method}"


def _classes_with_hooks(module: ModuleType) -> Iterator[str]:
    for name, value in vars(module).items():
        is_own = inspect.isclass(value) and value.__module__ == module.__name__
        if is_own and any(hasattr(one, f"{PROJECT}_impl") for one in vars(value).values()):
            yield name


SAVE = "state_dict"
LOAD = "load_state_dict"


def keeps_state(plugin: Plugin) -> bool:
    """Returns whether a plugin has a state to save.

    Methods inherited from torch by a module, an optimizer or a scheduler don't count.
    """
    return plugin.role != "core" and len(_own(plugin)) == 2


def _state_misfits(plugin: Plugin) -> _Misfits:
    """Finds mistakes that would lose a plugin's state, or fail when a run is resumed."""
    own = _own(plugin)
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
    if SAVE in own and not _takes(own[SAVE], 0):
        yield "state_dict is called without arguments", "write `def state_dict(self)`", SAVE
    if LOAD in own and not _takes(own[LOAD], 2):
        yield (
            "load_state_dict is called with two arguments, the state and the version of the plugin "
            "that wrote it",
            "write `def load_state_dict(self, state, version)`",
            LOAD,
        )
    if plugin.facts.state_per_rank and not own:
        yield (
            "state_per_rank=True has no effect: it keeps no state",
            "write `state_dict(self)` and `load_state_dict(self, state, version)`, or leave it out",
            "state_per_rank",
        )


def _own(plugin: Plugin) -> dict[str, Callable[..., Any]]:
    """Returns the two methods, unless they are missing or torch's."""
    found = {name: getattr(plugin.target, name, None) for name in (SAVE, LOAD)}
    origins = {name: str(getattr(one, "__module__", "")) for name, one in found.items()}
    is_torchs = {name for name, one in origins.items() if one.partition(".")[0] == "torch"}
    return {name: one for name, one in found.items() if callable(one) and name not in is_torchs}


def _takes(method: Callable[..., Any], number: int) -> bool:
    """Returns whether a method takes `number` arguments; torch's `strict` isn't a version."""
    try:
        signature = inspect.signature(method)
    except ValueError:  # of some that are written in C
        return True
    try:
        bound = signature.bind(*range(number)).arguments
    except TypeError:
        return False
    return "strict" not in bound
