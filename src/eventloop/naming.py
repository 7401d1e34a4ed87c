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

    `Label-Smoothing` and `label_smoothing` are one name.
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
    """Writes a plugin's name as that of its class: `label-smoothing` is LabelSmoothing."""
    return "".join(map(str.capitalize, fold(name).split("_")))


def full_name(kind: type) -> str:
    """Returns the name of a class with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


class FunctionName(str):
    """The name of a function that was given as a value: what is known of it, not what it does."""

    __slots__ = ()


def has_function(value: Any) -> bool:
    """Returns whether a nest of values has the name of a function in it."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return any(map(has_function, value))
    return isinstance(value, FunctionName)


def listed(objects: object, what: str) -> tuple[object, ...]:
    """Returns plugins that were handed over in a list as a tuple; raises TypeError otherwise."""
    if not isinstance(objects, Iterable) or isinstance(objects, str | Mapping):
        raise TypeError(f"{what}={objects!r} is not a list; write {what}=[...]")
    return tuple(objects)


def json_value(value: Any) -> Any:
    """Returns a value as JSON can hold it; what it can't, as text."""
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, (list, tuple)):
        return [json_value(one) for one in value]
    if isinstance(value, dict):
        return {str(name): json_value(one) for name, one in value.items()}
    return str(value)


def brief(value: Any) -> str:
    """Returns a value in a few words: functions and classes by name, objects by their class."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, functools.partial):
        return brief(value.func)
    if inspect.isroutine(value) or inspect.isclass(value):
        return value.__qualname__.rpartition("<locals>.")[2]
    if isinstance(value, Mapping):
        listed = ", ".join(f"{name!r}: {brief(one)}" for name, one in value.items())
        return f"{{{listed}}}"
    if type(value) in (list, tuple) and len(value) <= 8:
        return f"[{', '.join(map(brief, value))}]"
    return type(value).__name__


def is_in_range(version: str, specifier: str) -> bool:
    """Returns whether a version is in a range; pre-releases can be.

    Args:
        version: an invalid one is in no range.
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
    """Returns the name of a parameter or buffer as it is without `torch.compile`.

    `encoder._orig_mod.0.weight` is `encoder.0.weight`: a compiled module keeps the original as its
    child of that name (torch 2.13), and no public function takes it out of the keys of a state dict.
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod")
