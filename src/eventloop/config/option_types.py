"""Options: the typed, documented parameters of a class or function, and values for them."""

from __future__ import annotations

import enum
import functools
import inspect
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union

from eventloop.clock import Time
from eventloop.errors import SettingError, Subject, closest
from eventloop.fixes import shell
from eventloop.naming import fold
from eventloop.urls import Url
from eventloop.vocabulary import VALUES

REQUIRED = inspect.Parameter.empty
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_PARSERS = {Time: Time, Url: Url}
# Where values are written in Python.
IN_PYTHON = ("Trainer(...)", "task")
_EXAMPLES = {
    Time: "10ep", float: "0.5", int: "8", bool: "true", str: "TEXT", Path: "PATH",
    list[str]: '["TEXT"]',
}  # fmt: skip


@dataclass(frozen=True)
class Value:
    """The value of an option as written, and its source.

    Args:
        value: text from a flag or a variable, or a value from a file or from Python.
        source: for messages: flag, EVENTLOOP_SEED, run.yaml, task, default.
        typed: the option's name as the user wrote it, for messages; "" if that isn't known.
    """

    value: Any
    source: str
    typed: str = field(default="", compare=False)


@dataclass(frozen=True)
class Option:
    """A parameter that the user can set.

    Args:
        name: as its author wrote it.
        type: the annotation, or the type of the default; `Any` without either.
        default: `REQUIRED` if there is none.
        of: the owner of the option.
    """

    name: str
    type: Any
    default: Any
    of: Callable[..., Any]

    @property
    def doc(self) -> str:
        """Its entry in the docstring, on one line; read on first use."""
        return parameter_docs(self.of).get(self.name, "")

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return self.default is REQUIRED

    @property
    def type_name(self) -> str:
        """The type as help and messages name it."""
        return _type_name(self.type)

    @functools.cached_property
    def parser(self) -> Any:
        """The parser of its values, jsonargparse's; built on first use."""
        from jsonargparse import ArgumentParser
        from jsonargparse.typing import register_type

        for one, parse in _PARSERS.items():
            register_type(one, serializer=str, deserializer=parse)
        parser = ArgumentParser(exit_on_error=False)
        # Alone, a dataclass such as Time would be read as a nested configuration; in a union its
        # registered form is used (jsonargparse 4.53).
        parser.add_argument("--value", type=self.type | None)
        return parser


@functools.cache
def options_of(function: Callable[..., Any]) -> Mapping[str, Option]:
    """Returns the options of a function or of a class's constructor, by folded name."""
    init = function.__init__ if inspect.isclass(function) else function
    namespace = getattr(init, "__globals__", {})
    return {
        fold(name): Option(name, _type(parameter, namespace), parameter.default, function)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in _NAMED
    }


@functools.cache
def parameter_docs(function: Callable[..., Any]) -> dict[str, str]:
    """Returns each parameter's entry in the docstring, on one line."""
    import docstring_parser  # kept out of commands that show no options

    texts = [inspect.getdoc(function) or ""]
    if inspect.isclass(function):
        texts.append(inspect.getdoc(function.__init__) or "")
    return {
        entry.arg_name: " ".join((entry.description or "").split())
        for text in reversed(texts)
        for entry in docstring_parser.parse(text).params
    }


def flag(name: str, section: str = "") -> str:
    """Returns an option as typed: `--mixup.label-smoothing`."""
    return f"--{section}{'.' if section else ''}{name}".replace("_", "-")


def typed(
    option: Option,
    value: Value,
    section: str = "",
    subjects: Iterable[Subject] = (),
    *,
    convert: Callable[[Option, object], Any] | None = None,
    **facts: object,
) -> Any:
    """Converts the value of an option; an error says what is wrong with it and where it is set.

    Args:
        section: the plugin's name, or "task"; "" for a setting.
        subjects: the plugin, for messages.
        convert: a conversion in addition to the type.
        facts: further fields of the message.

    Raises:
        SettingError: the value isn't of the option's type.
    """
    if value.source == "default":
        return value.value
    try:
        return (convert or convert_value)(option, value.value)
    except ValueError as error:
        here = _as_bool(option, value.value) or (
            "" if section else _translated(option, value.value)
        )
        example = here or _example(option)
        reason = str(error)
        if here:
            reason = f"{reason.partition('; the closest is ')[0]}; here it is {here}"
        written = f"`{option.name}={as_python(example)}`"
        if value.source not in IN_PYTHON:
            is_variable = value.source.startswith("EVENTLOOP_")
            assignment = f"{value.source}={example}"
            written = (
                shell(assignment) if is_variable else shell(flag(option.name, section), example)
            )
        raise SettingError(
            f"{section}{'.' if section else ''}{option.name}: {reason}",
            subjects=subjects,
            **facts,
            source=value.source,
            fix=f"give it as {option.type_name}: {written}",
        ) from None  # the message has all of it; jsonargparse chains five


def convert_value(option: Option, raw: object) -> Any:
    """Converts what the user wrote into a value of the option's type.

    Args:
        raw: text from a flag or a variable, or a value from a file or from Python.

    Raises:
        ValueError: it has another type; the message says what was expected.
    """
    from jsonargparse import ArgumentError

    optional = option.type is Any or type(None) in _members(option.type)
    if optional and (raw is None or (isinstance(raw, str) and raw.lower() in ("none", "null"))):
        return None
    try:
        value = option.parser.instantiate(option.parser.parse_object({"value": raw}))["value"]
    except ArgumentError:
        raise ValueError(_reason(option, raw)) from None
    is_time = isinstance(value, int | float) and ":" in str(raw)
    if not is_time and (value is not None or optional):
        return value
    # The parser reads YAML 1.1: `~` and NULL are none of any type, 16:32 is a number of seconds.
    takes_text = {Any, str} & {*_members(option.type)} or raw in typing.get_args(option.type)
    if takes_text and raw is not None:
        return raw
    raise ValueError(_reason(option, raw))


def _as_bool(option: Option, raw: object) -> str:
    """Returns the boolean that a shell writes as 1 or 0; "" for other values and options."""
    text = str(raw).strip().lower()
    if bool not in _members(option.type):
        return ""
    if text in ("1", "y"):  # those of YAML, yes and on, are read as they are
        return "true"
    return "false" if text in ("0", "n") else ""


def _translated(option: Option, raw: object) -> str:
    """Returns what another trainer's value of a setting is here, as it is typed; "" for other values.

    A number without a unit counts epochs in most trainers, and steps where it is about logging.
    """
    text = str(raw).strip().lower()
    if here := VALUES.get(option.name, {}).get(text):
        return here
    if Time in _members(option.type) and text.isascii() and text.isdigit() and text != "0":
        return f"{text}{'ba' if option.name == 'log_interval' else 'ep'}"
    return ""


def _reason(option: Option, raw: object) -> str:
    for member in _members(option.type):
        if member in _PARSERS and isinstance(raw, str):
            try:
                _PARSERS[member](raw)
            except ValueError as error:
                return str(error)
    choices = _choices(option.type)
    shown = "none" if raw is None else repr(raw)
    kind = "one of" if choices else "of type"
    return f"{shown} isn't {kind} {option.type_name}{closest(str(raw), choices)}"


def _example(option: Option) -> str:
    if isinstance(default := option.default, enum.Enum):
        return default.name
    if default and isinstance(default, list | tuple):
        return json.dumps(default, default=str)
    if isinstance(default, float | int | str):
        return str(default).lower()
    known = (_EXAMPLES.get(one) or "".join(_choices(one)[:1]) for one in _members(option.type))
    return next(filter(None, known), "VALUE")


def as_python(text: str) -> str:
    """Returns the Python literal for the text of a flag."""
    if text in ("true", "false", "none"):
        return text.capitalize()
    if text.startswith("["):
        return text
    try:
        float(text)
    except ValueError:
        return f'"{text}"'
    return text


def _type(parameter: inspect.Parameter, namespace: Mapping[str, Any]) -> Any:
    annotation = parameter.annotation
    if annotation is inspect.Parameter.empty:
        return _suggested(parameter.default)
    holder = types.SimpleNamespace(__annotations__={"type": annotation})
    try:
        found = typing.get_type_hints(holder, dict(namespace))["type"]
        optional = found | None
    except Exception:  # noqa: BLE001 - imported for type checkers only, or a text about it
        return Any
    return optional if parameter.default is None and found is not Any else found


def _suggested(default: object) -> Any:
    """The type that an unannotated parameter's default suggests."""
    if isinstance(default, bool | str):
        return type(default)
    if isinstance(default, int):
        return int | float
    return float if isinstance(default, float) else Any


def _members(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _choices(annotation: Any) -> list[str]:
    """Returns the values that a Literal or an Enum takes, as they are typed; none of other types."""
    if isinstance(annotation, enum.EnumMeta):
        return list(annotation.__members__)
    is_literal = typing.get_origin(annotation) is Literal
    return [str(one) for one in typing.get_args(annotation)] if is_literal else []


def _type_name(annotation: Any) -> str:
    members = _members(annotation)
    if len(members) > 1:
        return " or ".join(_type_name(member) for member in members)
    if choices := _choices(annotation):
        return ", ".join(choices)
    if annotation is type(None):
        return "none"
    if inspect.isclass(annotation) and not typing.get_args(annotation):
        return annotation.__name__.lower() if annotation in _PARSERS else annotation.__name__
    return str(annotation).replace("typing.", "")
