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
# Sources whose values are written in Python.
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
        typed: the option's name as the user wrote it, for messages; "" if unknown.
    """

    value: Any
    source: str
    typed: str = field(default="", compare=False)


@dataclass(frozen=True)
class Option:
    """A parameter that the user can set.

    Args:
        name: the parameter's name.
        type: the annotation, or the type of the default; `Any` without either.
        default: the default value, or `REQUIRED`.
        of: the function or class that has the parameter.
    """

    name: str
    type: Any
    default: Any
    of: Callable[..., Any]

    @property
    def doc(self) -> str:
        """The parameter's entry in the docstring, on one line; parsed on first use."""
        return parameter_docs(self.of).get(self.name, "")

    @property
    def required(self) -> bool:
        """Whether the option has no default."""
        return self.default is REQUIRED

    @property
    def type_name(self) -> str:
        """The name of the type in help and messages."""
        return _type_name(self.type)

    @functools.cached_property
    def parser(self) -> Any:
        """The jsonargparse parser for the option's values; built on first use, as it is slow to import."""
        from jsonargparse import ArgumentParser
        from jsonargparse.typing import register_type

        for kind, parse in _PARSERS.items():
            register_type(kind, serializer=str, deserializer=parse)
        parser = ArgumentParser(exit_on_error=False)
        # In a union with None: otherwise a dataclass such as Time is parsed as a nested configuration,
        # although it is registered (jsonargparse 4.53).
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
    import docstring_parser  # imported late, for commands that show no options

    texts = [inspect.getdoc(function) or ""]
    if inspect.isclass(function):
        texts.append(inspect.getdoc(function.__init__) or "")
    return {
        entry.arg_name: " ".join((entry.description or "").split())
        for text in reversed(texts)
        for entry in docstring_parser.parse(text).params
    }


def flag(name: str, section: str = "") -> str:
    """Returns an option as typed on the command line: `--mixup.label-smoothing`."""
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
    """Converts the value of an option to its type.

    Args:
        section: the plugin's name, or "task"; "" for a setting.
        subjects: the plugin, for messages.
        convert: replaces `convert_value`.
        facts: further fields of the message.

    Raises:
        SettingError: the value isn't of the option's type; the message has its source.
    """
    if value.source == "default":
        return value.value
    try:
        return (convert or convert_value)(option, value.value)
    except ValueError as error:
        translation = _as_bool(option, value.value)
        if not translation and not section:
            translation = _translated(option, value.value)
        example = translation or _example(option)
        reason = str(error)
        if translation:
            reason = f"{reason.partition('; the closest is ')[0]}; here it is {translation}"
        if value.source in IN_PYTHON:
            line_to_paste = f"`{option.name}={as_python(example)}`"
        elif value.source.startswith("EVENTLOOP_"):
            line_to_paste = shell(f"{value.source}={example}")
        else:
            line_to_paste = shell(flag(option.name, section), example)
        raise SettingError(
            f"{section}{'.' if section else ''}{option.name}: {reason}",
            subjects=subjects,
            **facts,
            source=value.source,
            fix=f"give it as {option.type_name}: {line_to_paste}",
        ) from None  # the message is complete, and jsonargparse chains five exceptions


def convert_value(option: Option, raw: object) -> Any:
    """Converts a value as the user wrote it to the option's type.

    Args:
        raw: text from a flag or a variable, or a value from a file or from Python.

    Raises:
        ValueError: `raw` isn't of the option's type; the message has the expected type.
    """
    from jsonargparse import ArgumentError

    is_none = raw is None or (isinstance(raw, str) and raw.lower() in ("none", "null"))
    optional = option.type is Any or type(None) in _members(option.type)
    if optional and is_none:
        return None
    try:
        value = option.parser.instantiate(option.parser.parse_object({"value": raw}))["value"]
    except ArgumentError:
        raise ValueError(_reason(option, raw)) from None
    # jsonargparse reads YAML 1.1, in which `~` and NULL are None, and 16:32 is a number of seconds.
    is_sexagesimal = isinstance(value, int | float) and ":" in str(raw)
    if not is_sexagesimal and (value is not None or optional):
        return value
    takes_text = {Any, str} & {*_members(option.type)} or raw in typing.get_args(option.type)
    if takes_text and raw is not None:
        return raw
    raise ValueError(_reason(option, raw))


def _as_bool(option: Option, raw: object) -> str:
    """Returns "true" or "false" for 1, y, 0 or n; "" for other values, and options that aren't boolean.

    The booleans of YAML, such as yes and on, are parsed as they are.
    """
    text = str(raw).strip().lower()
    if bool not in _members(option.type):
        return ""
    if text in ("1", "y"):
        return "true"
    if text in ("0", "n"):
        return "false"
    return ""


def _translated(option: Option, raw: object) -> str:
    """Translates another trainer's value of a setting, as it is typed; "" for other values.

    In other trainers a number without a unit mostly counts epochs, and for logging it counts steps.
    """
    text = str(raw).strip().lower()
    if translation := VALUES.get(option.name, {}).get(text):
        return translation
    is_number = text.isascii() and text.isdigit() and text != "0"
    if Time in _members(option.type) and is_number:
        unit = "ba" if option.name == "log_interval" else "ep"
        return f"{text}{unit}"
    return ""


def _reason(option: Option, raw: object) -> str:
    """Returns why a value isn't of the option's type, with the closest choice."""
    for member in _members(option.type):
        if member in _PARSERS and isinstance(raw, str):
            try:
                _PARSERS[member](raw)
            except ValueError as error:
                return str(error)
    choices = _choices(option.type)
    value = "none" if raw is None else repr(raw)
    relation = "one of" if choices else "of type"
    return f"{value} isn't {relation} {option.type_name}{closest(str(raw), choices)}"


def _example(option: Option) -> str:
    """Returns a valid value as it is typed: the default if it has a text, else one of the type's."""
    if isinstance(default := option.default, enum.Enum):
        return default.name
    if default and isinstance(default, list | tuple):
        return json.dumps(default, default=str)
    if isinstance(default, float | int | str):
        return str(default).lower()
    for member in _members(option.type):
        if member in _EXAMPLES:
            return _EXAMPLES[member]
        choices = [choice for choice in _choices(member) if choice]
        if choices:
            return choices[0]
    return "VALUE"


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
        resolved = typing.get_type_hints(holder, dict(namespace))["type"]
        optional = resolved | None
    except Exception:  # noqa: BLE001  an annotation imported only for type checkers, or plain text
        return Any
    if parameter.default is None and resolved is not Any:
        return optional
    return resolved


def _suggested(default: object) -> Any:
    """Returns the type of an unannotated parameter, derived from its default."""
    if isinstance(default, bool | str):
        return type(default)
    if isinstance(default, int):
        return int | float  # a default of 1 is often written for a float
    return float if isinstance(default, float) else Any


def _members(annotation: Any) -> tuple[Any, ...]:
    """Returns the members of a union, or the type itself."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _choices(annotation: Any) -> list[str]:
    """Returns the values of a Literal or an Enum, as they are typed; [] for other types."""
    if isinstance(annotation, enum.EnumMeta):
        return list(annotation.__members__)
    if typing.get_origin(annotation) is Literal:
        return [str(choice) for choice in typing.get_args(annotation)]
    return []


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
