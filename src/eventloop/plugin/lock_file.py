"""The text of `eventloop.lock`, and its comparison with the plugins of a run."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import importlib_metadata
import tomlkit

from eventloop.errors import PluginError
from eventloop.naming import fold
from eventloop.plugin.lock_digests import file_digests, is_editable, order_digest
from eventloop.secret_values import shown_options

if TYPE_CHECKING:
    from eventloop.plugin.records import Found, Plugin
    from eventloop.plugin.registry import Registry

_HEAD = "# Written by `eventloop plugins lock`; `eventloop fit` refuses any difference.\n"


def lock_text(registry: Registry) -> str:
    """Returns the lock as TOML: the discovered plugins, their files, and a digest of the order."""
    return _HEAD + tomlkit.dumps(lock_content(registry))


def lock_content(registry: Registry) -> dict[str, Any]:
    """Returns the content of a lock; plugins passed in Python are left out."""
    locked = [(plugin, plugin.found) for plugin in registry.plugins if plugin.found is not None]
    locked.sort(key=lambda pair: fold(pair[0].name))
    content: dict[str, Any] = {
        "eventloop": importlib_metadata.version("torch-eventloop"),
        "order": order_digest(registry.implementations, passed=False),
    }
    if locked:
        content["plugins"] = [_entry(plugin, found) for plugin, found in locked]
    return content


def check_lock(path: Path, registry: Registry, chosen: Collection[str] = ()) -> None:
    """Compares the plugins of a run with the lock; does nothing if there is no lock.

    Args:
        path: the lock.
        registry: the plugins of the run.
        chosen: the names of discovered plugins that the command would use. A chosen plugin isn't
            compared if the run is without it for a reason that no lock can know: the resumed run
            began without it, the task sets `autoload`, or the task passes a plugin of this name.

    Raises:
        PluginError: the plugins differ; the message has a diff from the lock to the environment.
    """
    if not path.is_file():
        return
    locked = _read(path)
    actual = lock_content(registry)
    if absent := _absent(registry, chosen):
        locked = _without(locked, absent)
        actual = _without(actual, absent)
    locked_lines = tomlkit.dumps(locked).splitlines()
    actual_lines = tomlkit.dumps(actual).splitlines()
    if locked_lines != actual_lines:
        diff = difflib.unified_diff(
            locked_lines, actual_lines, "locked", "installed", n=2, lineterm=""
        )
        files = ", ".join(_changes(locked, actual))
        changed: dict[str, Any] = {"changed": files} if files else {}
        raise PluginError(
            f"the plugins differ from {path.name}",
            lock=path,
            **changed,
            diff="\n    ".join(["", *diff]),
            fix="install the locked versions, or write a new lock with `eventloop plugins lock`, or "
            "ignore the lock once with `--unlocked`",
        )


def _absent(registry: Registry, chosen: Collection[str]) -> set[str]:
    """Returns the folded names of chosen plugins that the task or a resumed run leaves out."""
    active = {fold(plugin.name) for plugin in registry.plugins if plugin.found is not None}
    dormant = {fold(plugin.name) for plugin in registry.off if plugin.stage == "dormant"}
    return set(map(fold, chosen)) - active - dormant


def _without(content: Mapping[str, Any], absent: Collection[str]) -> dict[str, Any]:
    """Returns a lock without some plugins, and without the order, a digest over all plugins."""
    plugins = [entry for entry in _plugins(content) if fold(entry["name"]) not in absent]
    return {"eventloop": content.get("eventloop"), "plugins": plugins}


def _changes(locked: Mapping[str, Any], actual: Mapping[str, Any]) -> Iterator[str]:
    """Yields the changed files of plugins that are in both locks."""
    locked_files = {entry["name"]: entry["files"] for entry in _plugins(locked)}
    for entry in _plugins(actual):
        name = entry["name"]
        if name in locked_files:
            differing = locked_files[name].items() ^ entry["files"].items()
            yield from (f"{file} of {name}" for file in sorted({file for file, _ in differing}))


def _plugins(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"name": "", "files": {}} | entry for entry in content.get("plugins", [])]


def _read(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        _plugins(content)
    except (OSError, ValueError, TypeError) as error:  # it isn't text, TOML or a lock
        raise PluginError(
            f"{path.name} can't be read: {' '.join(str(error).split())}",
            lock=path,
            fix="write a new lock with `eventloop plugins lock`, or ignore it once with "
            "`--unlocked`",
        ) from error
    return content


def _entry(plugin: Plugin, discovered: Found) -> dict[str, Any]:
    """Returns a plugin's table in the lock."""
    entry: dict[str, Any] = {
        "name": plugin.name,
        "role": plugin.role,
        "distribution": plugin.distribution or plugin.source,
        "version": plugin.version,
    }
    if is_editable(discovered):
        entry["editable"] = True
    if plugin.options:
        options = sorted(shown_options(plugin.options).items())
        entry["options"] = {name: _plain(value) for name, value in options}
    return entry | {"files": dict(sorted(file_digests(discovered)))}


def _plain(value: object) -> object:
    """Returns a value in a type that TOML supports, as text if it has another type."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float) else str(value)
