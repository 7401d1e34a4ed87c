"""Finds attributes of a plugin that are meant for the core but would never be used.

These are unmarked hook functions, states that would be lost, and misspelt attributes. `validate.py`
checks the functions that are marked as hooks.
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

# Only names that are specific to other trainers: any class may have a method `train_dataloader`.
CALLED_BY_OTHERS = {
    name: event_name
    for name, event_name in HOOK_WORDS.items()
    if name.startswith("on_") or name.endswith("_step")
}

# Triples of message, fix, and the attribute's name.
_Misfits = Iterator[tuple[str, str, str]]


def mistakes(plugin: Plugin, hooks: Mapping[str, Hook]) -> Iterator[PluginError]:
    """Finds methods and attributes of a plugin that would never be called, read or saved."""
    if plugin.role == "core":
        return
    for message, fix, name in (*never_called(plugin, hooks), *_state_misfits(plugin)):
        yield plugin.problem(message, fix, method_of(plugin, name))
    for name, fact in misspelt_facts(plugin.target):
        message = f"no attribute of plugins is named {name!r}; the closest is {fact!r}"
        yield plugin.problem(message, "rename it")


def never_called(plugin: Plugin, hooks: Mapping[str, Hook]) -> _Misfits:
    """Finds functions meant as hook implementations that pluggy doesn't recognise."""
    target = plugin.target
    namespace = target if isinstance(target, ModuleType) else type(target)
    yield from _unmarked(namespace, hooks)
    for name, function in vars(namespace).items():
        is_meant = name in CALLED_BY_OTHERS and inspect.isfunction(function)
        if is_meant and not hasattr(function, f"{PROJECT}_impl"):
            yield (
                f"{name} is a hook of another trainer, and would never be called; here it is "
                f"{CALLED_BY_OTHERS[name]}",
                "give it that name under @hookimpl, or any other name",
                name,
            )
    attributes = getattr(target, "__dict__", {})
    for name in attributes if namespace is not target else ():
        if name in hooks and hasattr(getattr(namespace, name, None), f"{PROJECT}_impl"):
            yield (
                f"the attribute {name} hides the hook method of the same name",
                "give the attribute another name",
                name,
            )
    for name, value in {**attributes, **vars(namespace)}.items():
        function = getattr(value, "fget", None) or getattr(value, "func", None)
        is_descriptor = hasattr(type(value), "__get__")
        is_computed = namespace is not target and is_descriptor and name in vars(namespace)
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


def _unmarked(namespace: Any, hooks: Mapping[str, Hook]) -> _Misfits:
    """Finds functions with a hook's name and signature, but without the marker."""
    # The `forward` of an nn.Module is its usual method, not meant as the action `forward`.
    is_module = any(
        base.__module__.startswith("torch.nn.") for base in getattr(namespace, "__mro__", ())
    )
    module = namespace.__name__ if isinstance(namespace, ModuleType) else namespace.__module__
    for name, function in vars(namespace).items():
        is_own = inspect.isfunction(function) and function.__module__ == module
        is_marked = hasattr(function, f"{PROJECT}_impl") or hasattr(function, f"{PROJECT}_spec")
        if name not in hooks or not is_own or is_marked or (is_module and name == "forward"):
            continue
        parameters = [
            parameter_name
            for parameter_name in inspect.signature(function).parameters
            if parameter_name != "self"
        ]
        if not parameters or parameters[0] == "state":
            yield (
                f"{name} is the name of a hook, but this function isn't marked, so it would "
                "never be called",
                "put @hookimpl above it, or rename it",
                name,
            )


def without_hooks(plugin: Plugin) -> PluginError:
    """Returns the error for a plugin without hooks; the fix names classes that have hooks."""
    target = plugin.target
    description = a(type(target).__name__)
    fix = "give it methods under @hookimpl; `eventloop plugins hooks` lists them"
    if isinstance(target, ModuleType):
        description = "a module"
        if classes := list(_classes_with_hooks(target)):
            label = plugin.source if plugin.found and plugin.found.path else target.__name__
            labels = [f"{label}:{name}" for name in classes]
            by_flag = plugin.found is not None and plugin.found.by_flag
            choices = [f"`-p {name}`" if by_flag else f'"{name}"' for name in labels]
            fix = f"name a class in it: {' or '.join(choices)}"
    elif inspect.isroutine(target):
        description = f"the function {getattr(target, '__name__', target)!r}"
        fix = "name a class, an instance or a module with functions under @hookimpl"
    description = f"{plugin.name} implements no hook, so it would do nothing: it is {description}"
    return plugin.problem(description, fix)


def method_of(plugin: Plugin, method: str) -> str:
    """Returns a method's name for messages: `method Ema.batch_end`."""
    target = plugin.target
    kind = getattr(target, "__name__", None) or type(target).__name__
    return f"method {kind}.{method}"


def _classes_with_hooks(module: ModuleType) -> Iterator[str]:
    for name, value in vars(module).items():
        is_own = inspect.isclass(value) and value.__module__ == module.__name__
        if is_own and any(hasattr(member, f"{PROJECT}_impl") for member in vars(value).values()):
            yield name


SAVE = "state_dict"
LOAD = "load_state_dict"


def keeps_state(plugin: Plugin) -> bool:
    """Returns whether a plugin has a state to save.

    Methods inherited from torch by a module, an optimizer or a scheduler don't count.
    """
    return plugin.role != "core" and len(_own(plugin)) == 2


def _state_misfits(plugin: Plugin) -> _Misfits:
    """Finds mistakes that would lose a plugin's state, or make resuming the run fail."""
    methods = _own(plugin)
    if list(methods) == [SAVE]:
        yield (
            "it has state_dict without load_state_dict, so its saved state would never be loaded",
            "write `def load_state_dict(self, state, version)`",
            SAVE,
        )
    if list(methods) == [LOAD]:
        yield (
            "it has load_state_dict without state_dict, so no state would be saved for it",
            "write `def state_dict(self)`",
            LOAD,
        )
    if SAVE in methods and not _takes(methods[SAVE], 0):
        yield "state_dict is called without arguments", "write `def state_dict(self)`", SAVE
    if LOAD in methods and not _takes(methods[LOAD], 2):
        yield (
            "load_state_dict is called with two arguments, the state and the version of the plugin "
            "that wrote it",
            "write `def load_state_dict(self, state, version)`",
            LOAD,
        )
    if plugin.facts.state_per_rank and not methods:
        yield (
            "state_per_rank=True has no effect without a state",
            "write `state_dict(self)` and `load_state_dict(self, state, version)`, or leave it out",
            "state_per_rank",
        )


def _own(plugin: Plugin) -> dict[str, Callable[..., Any]]:
    """Returns the plugin's `state_dict` and `load_state_dict`, without methods inherited from torch."""
    methods = {name: getattr(plugin.target, name, None) for name in (SAVE, LOAD)}
    origins = {name: str(getattr(method, "__module__", "")) for name, method in methods.items()}
    is_torchs = {name for name, method in origins.items() if method.partition(".")[0] == "torch"}
    return {
        name: method
        for name, method in methods.items()
        if callable(method) and name not in is_torchs
    }


def _takes(method: Callable[..., Any], number: int) -> bool:
    """Returns whether a method takes `number` positional arguments.

    A method with torch's signature, `(state_dict, strict)`, doesn't: the core passes the version as
    the second argument.
    """
    try:
        signature = inspect.signature(method)
    except ValueError:  # some functions written in C have no signature
        return True
    try:
        bound = signature.bind(*range(number)).arguments
    except TypeError:
        return False
    return "strict" not in bound
