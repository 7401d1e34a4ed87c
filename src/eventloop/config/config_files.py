"""Configuration files: the YAML file of `--config`, and TOML files, `pyproject.toml` and the site's."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eventloop.config.option_types import Value
from eventloop.config.plugin_flags import Local, is_local
from eventloop.config.plugin_rules import KEYS
from eventloop.config.settings import SETTING_NAMES
from eventloop.config.value_sources import SITE_VARIABLE, Layer
from eventloop.errors import SettingError, closest, closest_at
from eventloop.naming import fold
from eventloop.safe_text import one_line

_MAX_TOML_BYTES = 2**22  # generous, as a pyproject.toml can be full of other tools' settings
MAX_YAML_BYTES = 2**16  # the YAML parser, in pure Python, takes a second for as much


def yaml_layer(path: Path) -> Layer:
    """Reads the YAML file of `--config`, which has the entries of `[tool.eventloop]`.

    Raises:
        SettingError: the file can't be read, isn't YAML, or has other entries.
    """
    from eventloop.config import yaml_text

    text = _read(path, max_bytes=MAX_YAML_BYTES)
    try:
        content = yaml_text.load_yaml(text)
    except yaml_text.YamlTextError as error:
        raise _unreadable(path, "YAML", error) from error
    return _file_layer(content, str(path), path)


def pyproject_layer(path: Path, source: str) -> Layer:
    """Reads `[tool.eventloop]` of a `pyproject.toml`; raises SettingError if its form is wrong."""
    tools = _mapping(_read_toml(path).get("tool"), "tool", source)
    return _file_layer(tools.get("eventloop"), source, path)


def site_rules(environ: Mapping[str, str]) -> dict[str, Value]:
    """Reads the rules in the TOML file that EVENTLOOP_SITE_CONFIG names; {} if the variable isn't set.

    Raises:
        SettingError: the file can't be read, or has an entry that isn't a rule.
    """
    if not (name := environ.get(SITE_VARIABLE, "")):
        return {}
    layer = _file_layer(_read_toml(Path(name), SITE_VARIABLE), name, Path(name))
    for key, value in layer.values.items():
        raise SettingError(
            f"{SITE_VARIABLE} names a file with {key!r}, but the file may only contain rules"
            f"{closest(key, KEYS)}",
            source=value.source,
            fix=f"leave it out; the rules are {', '.join(KEYS)}",
        )
    return dict(layer.rules)


def find_pyproject(directory: Path) -> tuple[Path, str] | None:
    """Finds the nearest `pyproject.toml` upwards, and its path relative to `directory`."""
    directory = directory.resolve()
    for folder in (directory, *directory.parents):
        if (path := folder / "pyproject.toml").is_file():
            return path, os.path.relpath(path, directory)
    return None


def _file_layer(content: object, source: str, path: Path) -> Layer:
    top = _mapping(content, "the file", source)
    rules = {key: Value(top[key], source) for key in KEYS if key in top and key != "plugins"}
    if isinstance(listed := top.get("plugins"), list):
        folder = path.resolve().parent
        rules["plugins"] = Value(
            [Local(_label(label, source), source, folder) for label in listed], source
        )
    # `plugins` can also be a table, of options by plugin; then it isn't among the rules.
    values = _flatten({key: value for key, value in top.items() if key not in rules}, source)
    return Layer("file", values, rules)


def _label(value: object, source: str) -> str:
    if isinstance(value, str) and is_local(value):
        return value
    raise SettingError(
        f"plugins should hold sections of options, or a list of files and modules, but has {value!r}",
        source=source,
        fix='write plugins = ["./watch.py:Watch", "package.module:Class"]; installed plugins are '
        "active without being listed",
    )


def _flatten(top: Mapping[str, Any], source: str) -> dict[str, Value]:
    """Returns values by dotted key; a plugin's section can be in `plugins` or at the top level."""
    values: dict[str, Value] = {}
    sections = [*_mapping(top.get("plugins"), "plugins", source).items()]
    for key, value in top.items():
        if key == "plugins":
            continue
        if key == "task" or (isinstance(value, Mapping) and fold(key) not in SETTING_NAMES):
            sections.append((key, value))
        else:
            _add(values, key, value, source)
    for section, options in sections:
        for key, value in _mapping(options, section, source).items():
            _add(values, f"{section}.{key}", value, source)
    return values


def _mapping(content: object, subject: str, source: str) -> Mapping[str, Any]:
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise SettingError(
            f"{subject} should hold names with values, not {one_line(repr(content), 100)}",
            source=source,
            fix="write settings as `max_duration: 10ep` in YAML, `max_duration = '10ep'` in TOML",
        )
    return {str(key): value for key, value in content.items()}


def _add(values: dict[str, Value], key: str, value: object, source: str) -> None:
    if fold(key) in values:
        raise SettingError(f"{key!r} is given twice", source=source, fix="leave one of them out")
    values[fold(key)] = Value(value, source, key)


def _read_toml(path: Path, named_by: str = "") -> dict[str, Any]:
    text = _read(path, named_by).replace("\r\n", "\n")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also for a number of 5,000 digits
        raise _unreadable(path, "TOML", error) from error


def _read(path: Path, named_by: str = "", *, max_bytes: int = _MAX_TOML_BYTES) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) <= max_bytes:
            return data.decode("utf-8-sig")
    except FileNotFoundError as error:
        folder = path.parent
        fix = "give the path of a YAML file, `--config run.yaml`"
        if named_by:
            fix = f"fix or unset the variable {named_by}"
        raise SettingError(
            f"there is no file {str(path)!r}{closest_at(path)}",
            folder=folder.resolve(),
            fix=fix,
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, "text", error) from error
    raise SettingError(
        f"{one_line(str(path))} has more than {max_bytes:,} bytes, which no configuration needs",
        fix="give the right file; keep data in separate files",
    )


def _unreadable(path: Path, form: str, error: Exception) -> SettingError:
    return SettingError(
        f"{one_line(str(path))} can't be read as {form}: {' '.join(str(error).split())}",
        fix="fix the file",
    )
