"""Layers of values with their sources, and the layer of environment variables.

`config_files.py` reads the layers of files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from eventloop.config.option_types import Value, flag
from eventloop.errors import SettingError
from eventloop.naming import fold
from eventloop.vocabulary import ACCUMULATION, SETTINGS

PREFIX = "EVENTLOOP_"
AUTOLOAD_VARIABLE = "EVENTLOOP_DISABLE_PLUGIN_AUTOLOAD"
SITE_VARIABLE = "EVENTLOOP_SITE_CONFIG"
TIMEOUT_VARIABLE = "EVENTLOOP_TIMEOUT_S"
TOKEN_VARIABLE = "EVENTLOOP_STORE_TOKEN"
_NO_SETTINGS = (AUTOLOAD_VARIABLE, SITE_VARIABLE, TIMEOUT_VARIABLE, TOKEN_VARIABLE)
SourceKind = Literal["flag", "keyword", "variable", "file"]
_YES = ("true", "yes", "on", "1")
_NO = ("false", "no", "off", "0", "")


@dataclass(frozen=True)
class Layer:
    """The values from a single source, such as the flags or a file.

    Args:
        kind: the kind of source, which decides how keys are written.
        values: the values by folded key: `max_duration`, `task.lr`, `mixup.alpha`.
        rules: the rules of a file about plugins, with the keys `plugin_rules.KEYS`.
    """

    kind: SourceKind
    values: Mapping[str, Value]
    rules: Mapping[str, Value] = field(default_factory=dict)


def spell(key: str, kind: SourceKind) -> str:
    """Formats a folded key as written in a layer of that kind."""
    section = key.partition(".")[0] if "." in key else ""
    if kind == "flag":
        return flag(key)
    if kind == "variable":
        return PREFIX + key.replace(".", "__", 1).upper()
    return f"plugins.{key}" if kind == "file" and section not in ("", "task") else key


def example(key: str, value: object, kind: SourceKind) -> str:
    """Formats a setting with a value as written in a layer of that kind."""
    if kind == "keyword":
        return f"{key}={json.dumps(value)}"
    separator = {"flag": " ", "variable": "=", "file": ": "}[kind]
    return f"{spell(key, kind)}{separator}{value}"


def setting_for(word: str, kind: SourceKind, value: object = None) -> str:
    """Returns the setting for another trainer's word, with a value, as written in a layer of that kind.

    Args:
        value: the user's value for the word, if any.
    """
    name, sample = SETTINGS[word]
    written = example(name, sample, kind)
    if word not in ACCUMULATION:
        return written
    # Elsewhere gradients of several batches are accumulated; here a batch is split into microbatches.
    text = str(value)
    num_microbatches = 4
    if text.isascii() and text.isdigit() and 1 < int(text) < 10_000:
        num_microbatches = int(text)
    return (
        f"{written} with DataLoader(..., batch_size={sample * num_microbatches}): a step trains on one "
        f"batch of the loader, split into {num_microbatches} microbatches"
    )


def environment_layer(environ: Mapping[str, str]) -> Layer:
    """Reads the variables `EVENTLOOP_MAX_DURATION`, `EVENTLOOP_TASK__LR`, `EVENTLOOP_MIXUP__ALPHA`.

    An empty variable counts as unset.

    Raises:
        SettingError: EVENTLOOP_DISABLE_PLUGIN_AUTOLOAD isn't a boolean.
    """
    values = {}
    for variable, text in environ.items():
        if text and variable.startswith(PREFIX) and variable not in _NO_SETTINGS:
            key = fold(variable.removeprefix(PREFIX)).replace("__", ".", 1)
            values[key] = Value(text, variable, variable)
    if as_bool(Value(environ.get(AUTOLOAD_VARIABLE, ""), AUTOLOAD_VARIABLE)):
        values["autoload"] = Value(False, AUTOLOAD_VARIABLE)
    return Layer("variable", values)


def as_bool(value: Value) -> bool:
    """Converts a value to a boolean without importing a parser; raises SettingError for other values."""
    text = str(value.value).lower()
    if text not in (*_YES, *_NO):
        raise SettingError(
            f"{value.value!r} is neither true nor false",
            source=value.source,
            fix="write true or false",
        )
    return text in _YES


def autoload_of(value: Value) -> bool | Literal["callbacks"]:
    """Converts a value of the setting `autoload`; raises SettingError as `as_bool` does."""
    return "callbacks" if value.value == "callbacks" else as_bool(value)
