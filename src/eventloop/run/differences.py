"""What differs between a run as it was begun and as it is started now."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eventloop.naming import fold

_NOTHING = "none"
# What changes neither the weights nor what is known of them.
_FREE = frozenset(
    {
        "autoload",
        "checkpoint_best",
        "checkpoint_interval",
        "checkpoint_keep",
        "gc_interval",
        "log_interval",
        "on_callback_error",
        "on_save_error",
        "resume",
        "run_dir",
    }
)


def config_differences(
    then: Mapping[str, Any], now: Mapping[str, Any], section: str
) -> Iterator[str]:
    """Yields a line for each value of a section of the manifest that isn't what it was.

    As in a diff: `settings.seed: 0 -> 1`.
    """
    before, after = (dict(_flat(section, one.get(section))) for one in (then, now))
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key, _NOTHING), after.get(key, _NOTHING)
        if old != new and key.removeprefix("settings.") not in _FREE:
            yield f"{key}: {old} -> {new}"


def task_differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yields what isn't as it was in a task: its options, and the lines of its file.

    Args:
        then, now: what the manifests say of the task; nothing where it was made in Python.
    """
    before, after = dict(then), dict(now)
    old, new = before.pop("source", ""), after.pop("source", "")
    if not before or not after:
        return
    if old and new and old != new:
        del before["digest"], after["digest"]
        lines = difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm="")
        yield from (line for line in lines if not line.startswith(("---", "+++")))
    yield from config_differences({"task": before}, {"task": after}, "task")


def plugin_differences(
    then: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], allowed: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """Compares algorithms that take part in both.

    Args:
        allowed: names of those whose version may differ.

    Returns:
        A line for each version that differs, by the algorithm's name; and one for each option.
    """
    before = {fold(one["name"]): one for one in then if one["role"] == "algorithm"}
    versions: dict[str, str] = {}
    options: list[str] = []
    for one in now:
        old = before.get(fold(one["name"]))
        if old is None or one["role"] != "algorithm":
            continue
        if old["version"] != one["version"] and fold(one["name"]) not in map(fold, allowed):
            versions[one["name"]] = f"{one['name']}: {old['version']} -> {one['version']}"
        held = [
            {key: value for key, value in kept["options"].items() if key not in one.get("free", ())}
            for kept in (old, one)
        ]
        options += config_differences({one["name"]: held[0]}, {one["name"]: held[1]}, one["name"])
    return versions, options


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, one in value.items():
            yield from _flat(f"{name}.{key}", one)
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        for idx, one in enumerate(value):
            yield from _flat(f"{name}.{idx}", one)
    elif value not in ({}, None):
        yield name, value
