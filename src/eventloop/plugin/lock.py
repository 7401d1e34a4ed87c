"""The lock: which plugins a project trains with, written down, and compared before each run."""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from eventloop.config.layers import find_pyproject
from eventloop.errors import PluginError
from eventloop.naming import fold
from eventloop.plugin.records import Plugin

if TYPE_CHECKING:
    from eventloop.plugin.order import Ordered

NAME = "eventloop.lock"
_HEAD = "# Written by `eventloop plugins lock`; `eventloop fit` refuses any difference.\n"


def lock_path(directory: Path) -> Path:
    """Returns where the lock stands: beside the nearest `pyproject.toml`, else in the directory."""
    found = find_pyproject(directory)
    return (found[0].parent if found else directory) / NAME


def lock_text(plugins: Iterable[Plugin], implementations: Mapping[str, Ordered]) -> str:
    """Writes the plugins that take part, and a digest of their order, as TOML.

    Args:
        plugins: active; what wasn't found but handed over in Python is left out.
        implementations: by hook.
    """
    locked = sorted((one for one in plugins if one.found), key=lambda one: fold(one.name))
    tables = [_table(plugin) for plugin in locked]
    return "\n".join([f'{_HEAD}order = "{order_digest(implementations)}"\n', *tables])


def order_digest(implementations: Mapping[str, Ordered]) -> str:
    """Digests the order of algorithms and callbacks in every hook that has any.

    Two environments have one digest if and only if the same plugins run in the same order.
    """
    orders = {
        hook: [
            f"{one.plugin.role}:{fold(one.plugin.name)}"
            for one in ordered.implementations
            if one.plugin.role in ("algorithm", "callback")
        ]
        for hook, ordered in implementations.items()
    }
    listed = json.dumps({hook: names for hook, names in orders.items() if names}, sort_keys=True)
    return f"sha256:{hashlib.sha256(listed.encode()).hexdigest()}"


def check_lock(
    path: Path, plugins: Iterable[Plugin], implementations: Mapping[str, Ordered]
) -> None:
    """Compares what would take part with the lock; does nothing where there is none.

    Raises:
        PluginError: they differ, shown as a diff from the lock to what is here.
    """
    if not path.is_file():
        return
    locked = _read(path)
    actual = lock_text(plugins, implementations)
    if _content(locked) != _content(actual):
        diff = difflib.unified_diff(
            _content(locked), _content(actual), "locked", "installed", n=2, lineterm=""
        )
        raise PluginError(
            f"the plugins differ from what {path.name} says",
            lock=path,
            diff="\n    ".join(["", *diff]),
            fix="install what is locked, or write a new lock with `eventloop plugins lock`, or go "
            "without this time with `--unlocked`",
        )


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
        tomllib.loads(text)
    except (OSError, ValueError) as error:  # what is not a text or no TOML
        raise PluginError(
            f"{path.name} can't be read: {' '.join(str(error).split())}",
            lock=path,
            fix="write a new one with `eventloop plugins lock`, or go without this time with "
            "`--unlocked`",
        ) from error
    return text


def _table(plugin: Plugin) -> str:
    lines = [
        "[[plugins]]",
        f"name = {_toml(plugin.name)}",
        f"role = {_toml(plugin.role)}",
        f"distribution = {_toml(plugin.distribution or plugin.source)}",
        f"version = {_toml(plugin.version)}",
    ]
    options = [f"{name} = {_toml(plugin.options[name])}" for name in sorted(plugin.options)]
    if options:
        lines += ["[plugins.options]", *options]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    """Writes a value as TOML; what TOML doesn't know, as text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(str(value), ensure_ascii=False)


def _content(text: str) -> list[str]:
    """Returns the lines that say something."""
    return [line for line in text.splitlines() if line and not line.startswith("#")]
