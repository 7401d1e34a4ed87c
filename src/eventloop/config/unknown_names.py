"""Finds settings, options and plugins that don't exist, and flags without effect."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from eventloop.config.option_types import Value
from eventloop.config.plugin_rules import KEYS
from eventloop.config.settings import SETTING_NAMES
from eventloop.config.value_sources import Layer, SourceKind, setting_for, spell
from eventloop.errors import SettingError, closest
from eventloop.fixes import install, shell, use_without_plugin
from eventloop.naming import camel, fold
from eventloop.vocabulary import RULES, SETTINGS, TASK, TRAINER

_HOW_TO_FIX: dict[SourceKind, str] = {
    "flag": "rename the option or leave it out; `--help` lists all",
    "keyword": "rename the keyword or leave it out",
    "variable": "rename the variable or unset it",
    "file": "rename the entry or leave it out",
}


def unknown_keys(
    layers: Sequence[Layer],
    plugins: Mapping[str, Collection[str] | None],
    task_options: Collection[str] | None = None,
    passed: Collection[str] | None = (),
) -> Iterator[tuple[str, SettingError]]:
    """Yields unknown keys, and flags that would have no effect, each with its section.

    Args:
        plugins: the option names of every installed plugin; None for a plugin that is off.
        task_options: the task's option names; None for a task created in Python.
        passed: the names of plugins passed as instances; None if they aren't determined yet.
    """
    options = {fold(name): names for name, names in plugins.items()}
    existing_keys = []
    for plugin, names in options.items():
        existing_keys += [f"{plugin}.{fold(name)}" for name in names or ()]
    existing_keys += [f"task.{fold(name)}" for name in task_options or ()]
    instances = set(map(fold, passed or ()))
    yield from (("", problem) for problem in unknown_settings(layers, existing_keys))
    for kind, key, value in _keys(layers):
        section = key.partition(".")[0]
        if "." not in key or key in existing_keys:
            continue
        if section == "task" and task_options is None:
            continue
        if section in instances:
            if kind == "flag":
                yield section, _of_an_instance(kind, key, value)
        elif section == "task":
            yield section, unknown_name(kind, key, value, existing_keys)
        elif section not in options:
            # The plugin may still be passed as an instance, unless its name looks like a typing error.
            if passed is not None or closest(section, options):
                yield section, _not_installed(kind, key, value, options)
        elif options[section] is not None:
            yield section, unknown_name(kind, key, value, existing_keys)
        elif kind == "flag":
            problem = SettingError(
                f"{_as_typed(kind, key, value)!r} would have no effect: {section} is switched off",
                fix=f"leave it out, or switch the plugin on with {shell('-p', section)}",
            )
            yield section, problem


def unknown_settings(layers: Sequence[Layer], also: Sequence[str] = ()) -> Iterator[SettingError]:
    """Yields a problem for each unknown setting, with the closest setting or option."""
    for kind, key, value in _keys(layers):
        if "." not in key and key not in SETTING_NAMES:
            rules = KEYS if kind == "file" else ()
            yield unknown_name(kind, key, value, [*SETTING_NAMES, *also, *rules])


def unknown_name(
    kind: SourceKind, key: str, value: Value, existing_keys: Collection[str]
) -> SettingError:
    """Returns the error for an unknown key, with the closest existing key.

    A word of another trainer gets eventloop's word; the last part of a dotted key, such as `alpha`, all
    keys with that last part.
    """
    written = _as_typed(kind, key, value)
    same_option = [
        spell(existing_key, kind)
        for existing_key in existing_keys
        if existing_key.rpartition(".")[2] == key
    ]
    if same_option:
        hint = f"; did you mean {' or '.join(same_option)}?"
    elif key in SETTINGS:
        hint = f"; here it is {setting_for(key, kind, value.value)}"
    elif kind == "keyword" and key in TRAINER:
        hint = f"; here it is {TRAINER[key]}"
    elif kind == "file" and key in RULES:
        hint = f"; here it is {RULES[key]}"
    elif key in TASK:
        hint = f"; here it is Task({TASK[key]})"
    else:
        spelled_keys = [spell(existing_key, kind) for existing_key in existing_keys]
        hint = closest(spell(key, kind), spelled_keys)
    noun = "setting" if kind == "keyword" else "option"
    return SettingError(
        f"no {noun} is named {written!r}{hint}", source=value.source, fix=_HOW_TO_FIX[kind]
    )


def _not_installed(
    kind: SourceKind, key: str, value: Value, plugins: Collection[str]
) -> SettingError:
    section = key.partition(".")[0]
    reason = "which isn't installed" + closest(section, [*plugins, "task"])
    if use_without_plugin(section):
        reason = "which doesn't exist"
    return SettingError(
        f"{_as_typed(kind, key, value)!r} is for a plugin {section!r}, {reason}",
        source=value.source,
        fix=install(section),
    )


def _of_an_instance(kind: SourceKind, key: str, value: Value) -> SettingError:
    section, _, option = key.partition(".")
    return SettingError(
        f"{_as_typed(kind, key, value)!r} would have no effect: {section} is an instance that was created "
        "in Python",
        source=value.source,
        fix=f"set {option} in the task file, where it is created: {camel(section)}({option}=...)",
    )


def _as_typed(kind: SourceKind, key: str, value: Value) -> str:
    """Returns a key as the user typed it; if that is unknown, in the usual form for its kind of source."""
    section = key.partition(".")[0] if "." in key else ""
    if value.typed and kind == "file" and section not in ("", "task"):
        return f"plugins.{value.typed}"
    return value.typed or spell(key, kind)


def _keys(layers: Sequence[Layer]) -> list[tuple[SourceKind, str, Value]]:
    """Returns every key with the kind of its layer and its value."""
    return [(layer.kind, key, value) for layer in layers for key, value in layer.values.items()]
