"""Names as people write and read them: folded for comparison, in kebab-case, with versions."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9_-]*)\s*(.*?)\s*")


@functools.lru_cache(maxsize=4096)
def fold(name: str) -> str:
    """Folds a name to the form in which names are compared: lower case, no dashes.

    `Label-Smoothing` and `label_smoothing` are the same name.
    """
    return name.lower().replace("-", "_")


def kebab(name: str) -> str:
    """Writes a class's name in kebab-case: `LabelSmoothing` is label-smoothing, `EMA` is ema."""
    return "".join(
        f"-{char.lower()}"
        if char.isupper() and idx and not name[idx - 1].isupper()
        else char.lower()
        for idx, char in enumerate(name)
    )


def camel(name: str) -> str:
    """Writes a plugin's name as a class name: `label-smoothing` is LabelSmoothing."""
    return "".join(map(str.capitalize, fold(name).split("_")))


def full_name(kind: type) -> str:
    """Returns the name of a class with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


class FunctionName(str):
    """The name of a function that is the value of an option; its code isn't compared."""

    __slots__ = ()


def has_function(value: Any) -> bool:
    """Returns whether a nest of values contains the name of a function."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return any(map(has_function, value))
    return isinstance(value, FunctionName)


def listed(objects: object, argument_name: str) -> tuple[object, ...]:
    """Returns a list of plugins as a tuple.

    Raises:
        TypeError: `objects` isn't a list; the message has the argument's name.
    """
    if not isinstance(objects, Iterable) or isinstance(objects, str | Mapping):
        raise TypeError(f"{argument_name}={objects!r} is not a list; write {argument_name}=[...]")
    return tuple(objects)


def json_value(value: Any) -> Any:
    """Returns a value that JSON can store; values of other types as text."""
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, (list, tuple)):
        return [json_value(entry) for entry in value]
    if isinstance(value, dict):
        return {str(name): json_value(entry) for name, entry in value.items()}
    return str(value)


def brief(value: Any) -> str:
    """Returns a short description: functions and classes by name, objects by their class."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, functools.partial):
        return brief(value.func)
    if inspect.isroutine(value) or inspect.isclass(value):
        return value.__qualname__.rpartition("<locals>.")[2]
    if isinstance(value, Mapping):
        listed = ", ".join(f"{name!r}: {brief(entry)}" for name, entry in value.items())
        return f"{{{listed}}}"
    if type(value) in (list, tuple) and len(value) <= 8:
        return f"[{', '.join(map(brief, value))}]"
    return type(value).__name__


def is_in_range(version: str, specifier: str) -> bool:
    """Returns whether a version is in a range, which may include pre-releases.

    Args:
        version: an invalid version is in no range.
        specifier: in pip's syntax, ">=0.2,<1"; "" for any.
    """
    if not specifier:
        return True
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.version import InvalidVersion

    try:
        return SpecifierSet(specifier).contains(version, prereleases=True)
    except (InvalidVersion, InvalidSpecifier):
        return False


def split_requirement(text: str) -> tuple[str, str] | None:
    """Returns a plugin's name and version range, "" for any; None if it is invalid."""
    if (match := _REQUIREMENT.fullmatch(text)) is None:
        return None
    name, specifier = match.groups()
    if specifier:
        from packaging.specifiers import InvalidSpecifier, SpecifierSet

        try:
            SpecifierSet(specifier)
        except InvalidSpecifier:
            return None
    return name, specifier


def uncompiled_name(name: str) -> str:
    """Returns the name that a parameter or buffer has without `torch.compile`.

    `encoder._orig_mod.0.weight` becomes `encoder.0.weight`. A compiled module has the original as a
    child of this name (torch 2.13), and no public function removes it from the keys of a state dict.
    """
    return ".".join(segment for segment in name.split(".") if segment != "_orig_mod")
