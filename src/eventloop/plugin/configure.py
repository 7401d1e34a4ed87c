"""Step 4, configure: builds a plugin with its options."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eventloop.clock import Time
from eventloop.config.option_types import Option, Value, flag, options_of, typed
from eventloop.errors import PluginError, SettingError, closest, text_of
from eventloop.fixes import shell
from eventloop.naming import FunctionName, brief, fold
from eventloop.plugin.plugin_attributes import PluginFacts, facts_of
from eventloop.plugin.records import FROM_ENTRY_POINT, Found, Plugin
from eventloop.secret_values import shown_options


def plugin_options(target: object) -> Mapping[str, Option]:
    """Returns the options of an entry point's object by folded name; only a class has some."""
    kind: Callable[..., Any] | None = target if inspect.isclass(target) else None
    return {} if kind is None else options_of(kind)


def configure(found: Found, target: object, values: Mapping[str, Value]) -> Plugin:
    """Builds a plugin.

    Args:
        target: the entry point's object; a class is instantiated, anything else is used as it is.
        values: its options by folded name.

    Raises:
        SettingError: an option is unknown or has the wrong type.
        PluginError: an option without a default isn't set, or the constructor raises.
    """
    options = typed_options(found, target, values)
    defaults = {option.name: option.default for option in plugin_options(target).values()}
    if inspect.isclass(target):
        target = build(found, target, options)
    return Plugin(
        name=found.name,
        role=found.role,
        target=target,
        distribution=found.distribution,
        version=found.version,
        source=found.entry_point.value if found.path else FROM_ENTRY_POINT,
        options={name: value for name, value in options.items() if value != defaults[name]},
        found=found,
    )


def build(found: Found, target: Callable[..., object], options: Mapping[str, Any]) -> object:
    """Calls what builds a plugin, or starts something for it; a failure names the plugin."""
    try:
        return target(**options)
    except Exception as error:
        arguments = ", ".join(f"{name}={value!r}" for name, value in shown_options(options).items())
        raise found.problem(
            f"{found.name} can't be built: {type(error).__name__}: " + text_of(error),
            "change its options, or " + found.way_out,
            call=f"{target.__name__}({arguments})",
        ) from error


def stored_options(target: object) -> dict[str, Any]:
    """Returns the non-default options of an instance that was built in Python.

    These are attributes named after a constructor's parameter, `alpha` or `_alpha`, whose values
    are numbers, text, times, functions (by name), tensors of up to a million entries (by digest),
    or lists and mappings of these; not models and other objects.
    """
    if not inspect.isfunction(type(target).__init__) or not hasattr(target, "__dict__"):
        return {}
    held, stored = vars(target), {}
    for name, parameter in inspect.signature(type(target)).parameters.items():
        known = _value(held.get(name, held.get(f"_{name}", _Opaque)))
        if known is not _Opaque and known != _value(parameter.default):
            stored[name] = known
    return stored


_LARGEST = 10**6  # entries of a tensor that is an option


class _Opaque:
    """Represents a value that can't be compared."""


def _value(value: Any) -> Any:
    """Returns a value as a manifest can hold it; imports no torch, which most commands don't need."""
    if value is None or isinstance(value, (bool, int, float, str, Path, Time)):
        return value
    if inspect.isroutine(value):
        return FunctionName(brief(value))
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value)
    if type(value).__module__ == "torch" and type(value).__name__ == "Tensor":
        if value.numel() > _LARGEST:
            return _Opaque
        digest = hashlib.sha256(str(value.detach().cpu().tolist()).encode()).hexdigest()[:16]
        return f"tensor of shape {tuple(value.shape)}, {value.dtype}, sha256 {digest}"
    if isinstance(value, list | tuple):
        entries = [_value(one) for one in value]
        return _Opaque if _Opaque in entries else entries
    if isinstance(value, dict):
        named = {str(key): _value(one) for key, one in value.items()}
        return _Opaque if _Opaque in named.values() else named
    return _Opaque


def dormant_reason(found: Found, target: object, values: Mapping[str, Value]) -> str | None:
    """Names the options that a plugin waits for: those without a default that aren't set.

    With `wakes_with`, it waits for any one of those options; with `off_until_named = True`, for any
    option or its name.

    Returns:
        `waiting for --distill.teacher`; None if nothing is missing.
    """
    needs = [option.name for option in plugin_options(target).values() if option.required]
    facts = facts_of(target) if inspect.isclass(target) else PluginFacts()
    return awaited(found.name, values, needs, facts.wakes_with, facts.off_until_named)


def awaited(
    name: str,
    values: Mapping[str, Value],
    needs: Iterable[str],
    wakes_with: Sequence[str],
    off_until_named: bool,
) -> str | None:
    """Returns what `dormant_reason` does, from what is known of a plugin.

    Args:
        needs: its options without a default.
    """
    if lacking := [flag(one, name) for one in needs if fold(one) not in values]:
        return f"waiting for {' and '.join(lacking)}"
    if off_until_named and not values:
        by_command = shell("eventloop", "plugins", "enable", name)
        return f"off until named: {shell('-p', name)}, or {by_command}"
    if not wakes_with or any(fold(one) in values for one in wakes_with):
        return None
    return f"waiting for {' or '.join(flag(one, name) for one in wakes_with)}"


def typed_options(found: Found, target: object, values: Mapping[str, Value]) -> dict[str, Any]:
    """Returns the options that were set, converted for the constructor; builds nothing.

    Raises:
        SettingError: an option is unknown or has the wrong type.
        PluginError: an option without a default isn't set.
    """
    options = plugin_options(target)
    for key in sorted(values.keys() - options.keys()):
        names = [option.name for option in options.values()]
        raise SettingError(
            f"{found.name} has no option {key!r}{closest(key, names)}",
            subjects=[found],
            plugin=found.origin,
            source=values[key].source,
            fix=f"its options are {', '.join(names)}"
            if names
            else "leave it out; it has no options",
        )
    for key, option in options.items():
        if option.required and key not in values:
            raise _missing(found, option)
    return {
        options[key].name: typed(options[key], value, found.name, [found], plugin=found.origin)
        for key, value in values.items()
    }


def _missing(found: Found, option: Option) -> PluginError:
    return found.problem(
        f"{found.name} needs its option {option.name!r}, which has no default",
        f"give it with {shell(flag(option.name, found.name), option.type_name.upper())}, or "
        + found.way_out,
    )
