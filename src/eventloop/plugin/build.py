"""Step 4, build: decides whether a loaded plugin waits for options, and builds it with them."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.clock import Time
from eventloop.config.option_types import Option, flag, options_of, typed
from eventloop.errors import PluginError, text_of
from eventloop.fixes import shell
from eventloop.naming import FunctionName, brief, fold
from eventloop.plugin.plugin_attributes import PluginFacts, facts_of
from eventloop.plugin.records import Plugin
from eventloop.secret_values import shown_options

if TYPE_CHECKING:
    from eventloop.config.configuration import Configuration


def plugin_options(target: object) -> Mapping[str, Option]:
    """Returns the options of an entry point's object by folded name; only classes have options."""
    kind: Callable[..., Any] | None = target if inspect.isclass(target) else None
    return {} if kind is None else options_of(kind)


def build(plugin: Plugin, configuration: Configuration) -> Plugin:
    """Builds a loaded plugin: instantiates a class, and uses any other object as it is.

    Raises:
        SettingError: an option has the wrong type.
        PluginError: an option without a default isn't set, or the constructor raises.
    """
    target = plugin.imported
    options = typed_options(plugin, configuration)
    defaults = {option.name: option.default for option in plugin_options(target).values()}
    if inspect.isclass(target):
        target = call(plugin, target, options)
    changed = {name: value for name, value in options.items() if value != defaults[name]}
    return replace(plugin, target=target, options=changed, stage="active")


def call(plugin: Plugin, function: Callable[..., object], options: Mapping[str, Any]) -> object:
    """Calls a plugin's constructor or another function of it.

    Raises:
        PluginError: the function raises; the error names the plugin and the call.
    """
    try:
        return function(**options)
    except Exception as error:
        arguments = ", ".join(f"{name}={value!r}" for name, value in shown_options(options).items())
        raise PluginError(
            f"{plugin.name} can't be built: {type(error).__name__}: " + text_of(error),
            subjects=[plugin],
            plugin=plugin.origin,
            call=f"{function.__name__}({arguments})",
            fix="change its options, or " + plugin.way_out,
        ) from error


def stored_options(target: object) -> dict[str, Any]:
    """Returns the non-default options of an instance that was built in Python.

    An option is read from the attribute that is named after a constructor's parameter, `alpha` or
    `_alpha`. Its value must be a number, a text, a time, a function (stored by name), a tensor of
    up to a million entries (stored by digest), or a list or mapping of these. Others, such as
    models, are left out.
    """
    if not inspect.isfunction(type(target).__init__) or not hasattr(target, "__dict__"):
        return {}
    attributes = vars(target)
    stored = {}
    for name, parameter in inspect.signature(type(target)).parameters.items():
        value = _value(attributes.get(name, attributes.get(f"_{name}", _Opaque)))
        if value is not _Opaque and value != _value(parameter.default):
            stored[name] = value
    return stored


_MAX_ENTRIES = 10**6  # of a tensor that is an option


class _Opaque:
    """Represents a value that can't be compared."""


def _value(value: Any) -> Any:
    """Returns a value in the form that a manifest can hold, or `_Opaque` if it has none.

    Compares names of types instead of importing torch, which most commands don't need.
    """
    if value is None or isinstance(value, (bool, int, float, str, Path, Time)):
        return value
    if inspect.isroutine(value):
        return FunctionName(brief(value))
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value)
    if type(value).__module__ == "torch" and type(value).__name__ == "Tensor":
        if value.numel() > _MAX_ENTRIES:
            return _Opaque
        digest = hashlib.sha256(str(value.detach().cpu().tolist()).encode()).hexdigest()[:16]
        return f"tensor of shape {tuple(value.shape)}, {value.dtype}, sha256 {digest}"
    if isinstance(value, list | tuple):
        entries = [_value(entry) for entry in value]
        return _Opaque if _Opaque in entries else entries
    if isinstance(value, dict):
        named = {str(key): _value(entry) for key, entry in value.items()}
        return _Opaque if _Opaque in named.values() else named
    return _Opaque


def dormancy(plugin: Plugin, configuration: Configuration) -> str:
    """Returns why a loaded plugin is dormant: `waiting for --distill.teacher`; "" if it isn't."""
    target = plugin.imported
    required = [option.name for option in plugin_options(target).values() if option.required]
    facts = facts_of(target) if inspect.isclass(target) else PluginFacts()
    return awaited(plugin, configuration, required, facts.wakes_with, facts.off_until_named)


def awaited(
    plugin: Plugin,
    configuration: Configuration,
    required: Iterable[str],
    wakes_with: Sequence[str],
    off_until_named: bool,
) -> str:
    """Returns the options that a plugin waits for before it takes part; "" if it doesn't wait.

    A plugin waits for all options without a default, for an option of `wakes_with`, and if it is
    `off_until_named`, for any option. A plugin that is requested by name doesn't wait.

    Args:
        plugin: the chosen or loaded plugin.
        required: the names of its options without a default.
        wakes_with: its attribute.
        off_until_named: its attribute.
    """
    if plugin.found is None or configuration.who_insists(plugin.found):
        return ""
    name = plugin.name
    values = configuration.section(name)
    if lacking := [flag(option, name) for option in required if fold(option) not in values]:
        return f"waiting for {' and '.join(lacking)}"
    if off_until_named and not values:
        by_command = shell("eventloop", "plugins", "enable", name)
        return f"off until named: {shell('-p', name)}, or {by_command}"
    if wakes_with and not any(fold(option) in values for option in wakes_with):
        return f"waiting for {' or '.join(flag(option, name) for option in wakes_with)}"
    return ""


def typed_options(plugin: Plugin, configuration: Configuration) -> dict[str, Any]:
    """Returns the options that the user set, converted to the types of the constructor.

    Raises:
        SettingError: an option has the wrong type.
        PluginError: an option without a default isn't set.
    """
    values = configuration.section(plugin.name)
    options = {}
    for key, option in plugin_options(plugin.imported).items():
        if key in values:
            options[option.name] = typed(
                option, values[key], plugin.name, [plugin], plugin=plugin.origin
            )
        elif option.required:
            type_name = option.type_name.upper()
            raise PluginError(
                f"{plugin.name} needs its option {option.name!r}, which has no default",
                subjects=[plugin],
                plugin=plugin.origin,
                fix=f"set it with {shell(flag(option.name, plugin.name), type_name)}, or "
                + plugin.way_out,
            )
    return options
