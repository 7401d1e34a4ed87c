"""`--print-config`: writes all values of a run as a configuration file, each with its source."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]

from eventloop.clock import Time
from eventloop.config.option_types import Option, Value
from eventloop.plugin.build import plugin_options
from eventloop.secret_values import shown
from eventloop.urls import Url

if TYPE_CHECKING:
    from eventloop.cli.job import Job


def config_lines(job: Job, task_settings: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of a configuration file: each value with its source.

    Raises:
        SettingError: a setting is invalid.
    """
    settings = job.configuration.settings(task_settings)
    for name, value in job.configuration.setting_values(task_settings).items():
        yield _line(name, getattr(settings, name), value)
    section = job.configuration.section("task")
    yield from _section("task", job.task_file.options, section, job.task_options(), "")
    if plugins_with_options := [
        plugin for plugin in job.plugins if plugin_options(plugin.imported)
    ]:
        yield "plugins:"
    for plugin in plugins_with_options:
        section = job.configuration.section(name := plugin.name)
        options = plugin_options(plugin.imported)
        yield from _section(name, options, section, job.plugin_options(plugin), "  ")


def _section(
    heading: str,
    options: Mapping[str, Option],
    section: Mapping[str, Value],
    typed: Mapping[str, Any],
    indent: str,
) -> Iterator[str]:
    if options:
        yield f"{indent}{heading}:"
    for key, option in options.items():
        value = section.get(key, Value(option.default, "default"))
        yield f"{indent}  {_line(option.name, typed.get(option.name, option.default), value)}"


def _line(name: str, typed: object, written: Value) -> str:
    masked = shown(name, _plain(typed))
    if masked != _plain(typed):  # a comment, so that the file doesn't set the mask as a password
        return f"# {name}: {masked}  # {written.source}; set it in the environment or in a file"
    for value in (_plain(typed), written.value):
        try:
            text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"))
        except yaml.representer.RepresenterError:
            continue
        text = text.strip().removesuffix("...").strip()  # YAML ends a lone value with dots
        return f"{name}: {text}  # {written.source}"
    return f"# {name}: {written.value!r}  # {written.source}"


def _plain(value: object) -> object:
    if isinstance(value, Time | Path | Url):
        return str(value)
    if isinstance(value, enum.Enum):
        return value.name
    return list(value) if isinstance(value, tuple | set | frozenset) else value
