"""What pluggy passes over in silence: hooks that are meant, and that nobody would call."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING

from eventloop.errors import PluginError, a
from eventloop.hooks import PROJECT, Hook

if TYPE_CHECKING:
    from eventloop.plugin.records import Plugin


def unmarked(plugin: Plugin, hooks: Mapping[str, Hook]) -> Iterator[PluginError]:
    """Finds functions that have a hook's name and look like it, but lack the mark."""
    target = plugin.target
    own = target if isinstance(target, ModuleType) else type(target)
    # An nn.Module's forward is its own affair.
    is_module = any(base.__module__.startswith("torch.nn.") for base in type(target).__mro__)
    for name, function in vars(own).items():
        if name not in hooks or not inspect.isfunction(function) or plugin.role == "core":
            continue
        if function.__module__ != getattr(own, "__name__" if own is target else "__module__"):
            continue
        if hasattr(function, f"{PROJECT}_impl") or (is_module and name == "forward"):
            continue
        parameters = [one for one in inspect.signature(function).parameters if one != "self"]
        if not parameters or parameters[0] == "state":
            yield PluginError(
                f"{name} is the name of a hook, but this function isn't marked, so that nobody "
                "would call it",
                plugin=f"{plugin.origin}, {method_of(plugin, name)}",
                fix=plugin.fix("put @hookimpl above it, or rename it"),
            )


def hidden(plugin: Plugin, hooks: Mapping[str, Hook]) -> Iterator[PluginError]:
    """Finds attributes of an instance that hide a hook method of its class."""
    target = plugin.target
    if isinstance(target, ModuleType):
        return
    for name in getattr(target, "__dict__", {}):
        method = getattr(type(target), name, None)
        if name in hooks and hasattr(method, f"{PROJECT}_impl"):
            yield PluginError(
                f"the attribute {name} hides the hook method of the same name",
                plugin=f"{plugin.origin}, {method_of(plugin, name)}",
                fix=plugin.fix("give the attribute another name"),
            )


def computed(plugin: Plugin, hooks: Mapping[str, Hook]) -> Iterator[PluginError]:
    """Finds properties and the like where a hook's method should be: pluggy passes them over."""
    target = plugin.target
    if isinstance(target, ModuleType) or plugin.role == "core":
        return
    for name, value in vars(type(target)).items():
        function = getattr(value, "fget", None) or getattr(value, "func", None)
        is_computed = hasattr(type(value), "__get__") and not isinstance(
            value, FunctionType | staticmethod | classmethod
        )
        if is_computed and (name in hooks or hasattr(function, f"{PROJECT}_impl")):
            yield PluginError(
                f"{name} is {a(type(value).__name__)}, not a method, so that nobody would call it",
                plugin=f"{plugin.origin}, {method_of(plugin, name)}",
                fix=plugin.fix("make it a method under @hookimpl, or rename it"),
            )


def without_hooks(plugin: Plugin) -> PluginError:
    """Gives the problem with a plugin that does nothing: what it is, and what could be meant."""
    target = plugin.target
    what = a(type(target).__name__)
    fix = "give it methods under @hookimpl; `eventloop plugins hooks` lists them"
    if isinstance(target, ModuleType):
        what = "a module"
        if classes := list(_classes_with_hooks(target)):
            label = plugin.source if plugin.found and plugin.found.path else target.__name__
            named = [f"{label}:{name}" for name in classes]
            is_file = plugin.found is not None and plugin.found.path is not None
            meant = [f"`-p {name}`" if is_file else f'"{name}"' for name in named]
            fix = f"name a class in it: {' or '.join(meant)}"
    elif inspect.isroutine(target):
        what = f"the function {getattr(target, '__name__', target)!r}"
        fix = "name a class, an instance or a module with functions under @hookimpl"
    return PluginError(
        f"{plugin.name} implements no hook, so that it would do nothing: it is {what}",
        plugin=plugin.origin,
        fix=plugin.fix(fix),
    )


def method_of(plugin: Plugin, method: str) -> str:
    """Names a method as messages do: `method Ema.batch_end`."""
    target = plugin.target
    kind = getattr(target, "__name__", None) or type(target).__name__
    return f"method {kind}.{method}"


def _classes_with_hooks(module: ModuleType) -> Iterator[str]:
    for name, value in vars(module).items():
        is_own = inspect.isclass(value) and value.__module__ == module.__name__
        if is_own and any(hasattr(one, f"{PROJECT}_impl") for one in vars(value).values()):
            yield name
