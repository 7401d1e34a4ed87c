"""Whether a nest that was read has the form that an annotation says."""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, NotRequired, Union

from torch import Tensor

from eventloop.errors import a
from eventloop.text import one_line

_MOST_CHARS = 80


class FormError(ValueError):
    """A value hasn't the form that it should have; the message begins with its path."""


class Within(NamedTuple):
    """Bounds of a number, both included; a NaN is in none."""

    low: float
    high: float


class Each(NamedTuple):
    """What every value must be, beside its type."""

    expected: str
    is_met: Callable[[Any], bool]


def require_form(value: Any, form: Any, path: str) -> None:
    """Checks a nest against an annotation, key by key.

    Args:
        form: made of None, bool, int, float (to which an int belongs), str, Tensor, Any, unions,
            `list[X]`, `tuple[X, Y]` (a list will do), `dict[K, V]`, TypedDicts, of which more keys
            may be there than they name, and `Annotated` with `Within` or `Each`.
        path: what the nest is called in messages.

    Raises:
        FormError: something isn't of its form, or isn't there.
    """
    origin = typing.get_origin(form)
    if form is Any:
        return
    if origin is Annotated:
        _require_annotated(value, form, path)
    elif origin in (Union, types.UnionType):
        _require_one(value, typing.get_args(form), path)
    elif typing.is_typeddict(form):
        _require_keys(value, form, path)
    elif origin is dict:
        _require_mapping(value, typing.get_args(form), path)
    elif origin is list:
        (entry,) = typing.get_args(form)
        for idx, one in enumerate(_sequence(value, path)):
            require_form(one, entry, f"{path}[{idx}]")
    elif origin is tuple:
        entries = typing.get_args(form)
        if len(_sequence(value, path)) != len(entries):
            raise FormError(f"{path} has {len(value)} entries, not {len(entries)}")
        for idx, (one, entry) in enumerate(zip(value, entries, strict=True)):
            require_form(one, entry, f"{path}[{idx}]")
    elif not _is_a(value, form):
        raise FormError(f"{path} is {_shown(value)}, not {_name(form)}")


def _require_annotated(value: Any, form: Any, path: str) -> None:
    inner, *bounds = typing.get_args(form)
    require_form(value, inner, path)
    for bound in bounds:
        if isinstance(bound, Within) and not bound.low <= value <= bound.high:
            raise FormError(
                f"{path} is {_shown(value)}, not between {bound.low:,} and {bound.high:,}"
            )
        if isinstance(bound, Each) and not bound.is_met(value):
            raise FormError(f"{path} is {_shown(value)}, not {bound.expected}")


def _require_one(value: Any, forms: Sequence[Any], path: str) -> None:
    if value is None and type(None) in forms:
        return
    others = [one for one in forms if one is not type(None)]
    if len(others) == 1:  # whose message is better than one about all
        require_form(value, others[0], path)
        return
    first: FormError | None = None
    for one in others:
        try:
            require_form(value, one, path)
        except FormError as error:
            first = first or error
            continue
        return
    if isinstance(value, Mapping) and first is not None:  # it has the name of what is wrong in it
        raise first
    names = " or ".join(_name(one) for one in forms)
    raise FormError(f"{path} is {_shown(value)}, not {names}")


def _require_keys(value: Any, form: Any, path: str) -> None:
    if not isinstance(value, Mapping):
        raise FormError(f"{path} is {_shown(value)}, not values by name")
    for key, (inner, is_required) in _keys(form).items():
        if key in value:
            require_form(value[key], inner, f"{path}.{key}")
        elif is_required:
            raise FormError(f"{path} has no {key!r}")


@functools.cache
def _keys(form: Any) -> dict[str, tuple[Any, bool]]:
    """Returns the form of each key of a TypedDict, and whether it must be there."""
    found = {}
    for key, inner in typing.get_type_hints(form, include_extras=True).items():
        is_optional = typing.get_origin(inner) is NotRequired or not form.__total__
        found[key] = (
            typing.get_args(inner)[0] if typing.get_origin(inner) is NotRequired else inner,
            not is_optional,
        )
    return found


def _require_mapping(value: Any, forms: Sequence[Any], path: str) -> None:
    if not isinstance(value, Mapping):
        raise FormError(f"{path} is {_shown(value)}, not values by name")
    key_form, entry = forms
    for key, one in value.items():
        require_form(key, key_form, f"a key of {path}")
        require_form(one, entry, f"{path}.{key}")


def _sequence(value: Any, path: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise FormError(f"{path} is {_shown(value)}, not a list")
    return value


def _is_a(value: Any, form: Any) -> bool:
    if form is None:
        return value is None
    if form is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    if form is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, form)


def _name(form: Any) -> str:
    if typing.get_origin(form) is Annotated:
        return _name(typing.get_args(form)[0])
    if typing.is_typeddict(form) or typing.get_origin(form) is dict:
        return "values by name"
    if typing.get_origin(form) in (list, tuple):
        return "a list"
    return "None" if form is type(None) else a(form.__name__)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping | list | tuple):
        return f"{a(type(value).__name__)} of {len(value):,}"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return one_line(repr(value), _MOST_CHARS)
