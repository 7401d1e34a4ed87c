"""Forms: functions that check values from a checkpoint, derived from dataclasses.

A part of a checkpoint is a dataclass that is declared next to the class whose state it is. `as_dict`
converts it to a dict, `from_dict` converts it back, and `form_of` derives the check of a file's
content from the types of the dataclass's fields.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import (
    Annotated,
    Any,
    Concatenate,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from eventloop.errors import a
from eventloop.safe_text import one_line

_MOST_CHARS = 80  # of a value in a message

T = TypeVar("T")


class FormError(ValueError):
    """A value doesn't match the schema; the message begins with its path."""


P = ParamSpec("P")
# Checks a value; takes the value's path for the message; raises FormError.
Form = Callable[[Any, str], None]


def _form(check: Callable[Concatenate[Any, str, P], None]) -> Callable[P, Form]:
    """Turns a check with additional arguments into a function of these that returns a `Form`."""

    def form(*args: P.args, **options: P.kwargs) -> Form:
        return lambda value, path: check(value, path, *args, **options)

    return form


def anything(value: Any, path: str) -> None:
    """Accepts every value."""


@_form
def is_a(value: Any, path: str, /, *kinds: type, but: type | None = None) -> None:
    """Checks that a value is an instance of one of the types, but not of the type `but`."""
    if not isinstance(value, kinds) or (but is not None and isinstance(value, but)):
        raise _refused(value, path, a(kinds[0].__name__))


@_form
def between(value: Any, path: str, low: float, high: float, number: Form | None = None, /) -> None:
    """Checks that a number, by default an int, is within inclusive bounds; a NaN never is."""
    (number or INT)(value, path)
    if not low <= value <= high:
        raise _refused(value, path, f"between {low:,} and {high:,}")


@_form
def meets(
    value: Any, path: str, condition: Callable[[Any], bool], form: Form, expected: str, /
) -> None:
    """Checks that a value matches a form and meets a condition."""
    form(value, path)
    if not condition(value):
        raise _refused(value, path, expected)


@_form
def optional(value: Any, path: str, form: Form, without: object = None, /) -> None:
    """Checks that a value is `without`, or matches a form."""
    if not (type(value) is type(without) and value == without):
        form(value, path)


@_form
def each(value: Any, path: str, form: Form, /, *, length: int | None = None) -> None:
    """Checks that every entry of a list or tuple matches a form."""
    if not isinstance(value, list | tuple):
        raise _refused(value, path, "a list")
    if length is not None and len(value) != length:
        raise FormError(f"{path} has {len(value)} entries, not {length}")
    for idx, element in enumerate(value):
        form(element, f"{path}[{idx}]")


@_form
def by_name(value: Any, path: str, form: Form, /) -> None:
    """Checks that every value of a dict with str keys matches a form."""
    _mapping(value, path)
    for key, entry in value.items():
        STR(key, f"a key of {path}")
        form(entry, f"{path}.{key}")


@_form
def keys(value: Any, path: str, may_have: Mapping[str, Form] | None = None, /, **has: Form) -> None:
    """Checks the values of a dict's required and optional keys; other keys are allowed."""
    _mapping(value, path)
    for key, form in has.items():
        if key not in value:
            raise FormError(f"{path} has no {key!r}")
        form(value[key], f"{path}.{key}")
    for key, form in (may_have or {}).items():
        if key in value:
            form(value[key], f"{path}.{key}")


def _mapping(value: Any, path: str) -> None:
    if not isinstance(value, Mapping):
        raise _refused(value, path, "values by name")


def _refused(value: Any, path: str, expected: str) -> FormError:
    shown = one_line(repr(value), _MOST_CHARS)
    if hasattr(type(value), "shape"):  # a tensor; torch isn't imported here
        shown = f"a tensor of shape {tuple(value.shape)}"
    elif isinstance(value, Mapping | list | tuple):
        shown = f"{a(type(value).__name__)} of {len(value):,}"
    return FormError(f"{path} is {shown}, not {expected}")


BOOL = is_a(bool)
STR = is_a(str)
INT = is_a(int, but=bool)
FLOAT = is_a(float, int, but=bool)
COUNT = between(0, 2**53)
SINCE = between(-1, 2**53)  # -1 means never
RANKS = between(1, 2**16)
SECONDS = between(0, 2**53, FLOAT)
NAMED = by_name(anything)

# Types for fields with bounds.
NonNegativeInt = Annotated[int, COUNT]
BatchOrNever = Annotated[int, SINCE]
NumRanks = Annotated[int, RANKS]

_PLAIN: dict[Any, Form] = {Any: anything, bool: BOOL, str: STR, int: INT, float: FLOAT}


@cache
def form_of(kind: Any) -> Form:
    """Returns the form for a dataclass, or for a type of a dataclass's fields.

    The form of `Annotated[type, form]` is `form`. Fields with a default may be missing.
    """
    origin = get_origin(kind)
    arguments = get_args(kind)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if dataclasses.is_dataclass(kind):
        return _form_of_dataclass(kind)
    if origin is Annotated:
        form: Form = arguments[1]
        return form
    if origin in (Union, types.UnionType):
        (alternative,) = (argument for argument in arguments if argument is not types.NoneType)
        return optional(form_of(alternative))
    if origin is list:
        return each(form_of(arguments[0]))
    if origin is dict:
        return by_name(form_of(arguments[1]))
    return is_a(kind)


def _form_of_dataclass(kind: Any) -> Form:
    hints = get_type_hints(kind, include_extras=True)
    required: dict[str, Form] = {}
    possible: dict[str, Form] = {}
    for field in dataclasses.fields(kind):
        has_default = field.default is not dataclasses.MISSING
        (possible if has_default else required)[field.name] = form_of(hints[field.name])
    return keys(possible, **required)


def as_dict(state: Any) -> dict[str, Any]:
    """Returns a dataclass as a dict of its fields; nested dataclasses become dicts, too.

    Unlike `dataclasses.asdict`, it doesn't copy values, so tensors are shared with the dataclass.
    """
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    return {
        name: as_dict(value) if dataclasses.is_dataclass(value) else value
        for name, value in fields.items()
    }


def from_dict(kind: type[T], saved: Mapping[str, Any]) -> T:
    """Inverse of `as_dict`; keys that the dataclass doesn't have are ignored.

    Raises:
        FormError: a value doesn't have its field's type.
    """
    hashable: Any = kind
    form_of(hashable)(saved, kind.__name__)
    hints = get_type_hints(kind, include_extras=True)
    fields = {name: saved[name] for name in hints if name in saved}
    for name, value in fields.items():
        nested = _dataclass_in(hints[name])
        if nested is not None and value is not None:
            fields[name] = from_dict(nested, value)
    return kind(**fields)


def _dataclass_in(hint: Any) -> Any:
    """Returns the dataclass that a field's type is or includes; None if there is no dataclass."""
    for candidate in (hint, *get_args(hint)):
        if dataclasses.is_dataclass(candidate):
            return candidate
    return None
