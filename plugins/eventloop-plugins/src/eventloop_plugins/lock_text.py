"""The text of `eventloop.lock`, and its comparison with what is installed."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import importlib_metadata

from eventloop.errors import PluginError
from eventloop.naming import fold
from eventloop.plugin.lock_digests import file_digests, is_editable, order_digest
from eventloop.secret_values import shown_options

if TYPE_CHECKING:
    from eventloop.plugin.order import Ordered
    from eventloop.plugin.owners import Assembly
    from eventloop.plugin.records import Found, Plugin

_HEAD = "# Written by `eventloop plugins lock`; `eventloop fit` refuses any difference.\n"


def lock_text(plugins: Iterable[Plugin], implementations: Mapping[str, Ordered]) -> str:
    """Returns the active plugins, their files, and a digest of their order, as TOML.

    Args:
        plugins: the active ones; those passed in Python are left out.
        implementations: by hook.
    """
    core = importlib_metadata.version("torch-eventloop")
    head = f'{_HEAD}eventloop = "{core}"\norder = "{order_digest(implementations)}"\n'
    locked = [(one, one.found) for one in plugins if one.found is not None]
    locked.sort(key=lambda one: fold(one[0].name))
    return "\n".join([head, *(_table(plugin, found) for plugin, found in locked)])


def check_lock(path: Path, assembly: Assembly) -> None:
    """Compares the active plugins with the lock; does nothing without one.

    Raises:
        PluginError: they differ; the message has a diff from the lock to the environment.
    """
    if not path.is_file():
        return
    locked = _read(path)
    actual = lock_text(assembly.plugins, assembly.implementations)
    if _content(locked) != _content(actual):
        diff = difflib.unified_diff(
            _content(locked), _content(actual), "locked", "installed", n=2, lineterm=""
        )
        files = ", ".join(_changes(tomllib.loads(locked), tomllib.loads(actual)))
        changed: dict[str, Any] = {"changed": files} if files else {}
        raise PluginError(
            f"the plugins differ from what {path.name} says",
            lock=path,
            **changed,
            diff="\n    ".join(["", *diff]),
            fix="install what is locked, or write a new lock with `eventloop plugins lock`, or go "
            "without this time with `--unlocked`",
        )


def _changes(locked: Mapping[str, Any], actual: Mapping[str, Any]) -> Iterator[str]:
    """Yields the changed files of plugins that are in both."""
    before, now = (
        {one.get("name"): one.get("files", {}) for one in each.get("plugins", ())}
        for each in (locked, actual)
    )
    for name in before.keys() & now.keys():
        files = before[name].items() ^ now[name].items()
        yield from (f"{file} of {name}" for file in sorted({file for file, _ in files}))


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
        tomllib.loads(text)
    except (OSError, ValueError) as error:  # what is not a text or no TOML
        raise PluginError(
            f"{path.name} can't be read: {' '.join(str(error).split())}",
            lock=path,
            fix="write a new one with `eventloop plugins lock`, or ignore it once with "
            "`--unlocked`",
        ) from error
    return text


def _table(plugin: Plugin, found: Found) -> str:
    lines = [
        "[[plugins]]",
        f"name = {_toml(plugin.name)}",
        f"role = {_toml(plugin.role)}",
        f"distribution = {_toml(plugin.distribution or plugin.source)}",
        f"version = {_toml(plugin.version)}",
    ]
    if is_editable(found):
        lines.append("editable = true")
    # TOML's bare keys are ASCII; Python's names needn't be.
    keys = {name: name if name.isascii() else _toml(name) for name in sorted(plugin.options)}
    values = shown_options(plugin.options)
    options = [f"{key} = {_toml(values[name])}" for name, key in keys.items()]
    files = [f"{_toml(name)} = {_toml(digest)}" for name, digest in sorted(file_digests(found))]
    for title, entries in (("options", options), ("files", files)):
        lines += [f"[plugins.{title}]", *entries] if entries else []
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    """Formats a value as TOML; values that TOML doesn't support, as text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(str(value), ensure_ascii=False)


def _content(text: str) -> list[str]:
    """Returns the lines without comments and empty ones."""
    return [line for line in text.splitlines() if line and not line.startswith("#")]
