"""The config of a run at W&B: settings, options and versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def config_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings, options of the task and of the plugins, by the names of their flags.

    W&B shows what is nested with dots: `max_duration`, `task.lr`, `mixup.alpha`.

    Args:
        manifest: of a run; see `State.manifest`.
    """
    found = {**manifest.get("settings", {})}
    found["task"] = (manifest.get("task") or {}).get("options") or {}
    for plugin in manifest.get("plugins", ()):
        found[plugin["name"]] = plugin["options"]
    found["versions"] = manifest.get("versions") or {}
    plain: dict[str, Any] = _plain(found)
    return plain


def _plain(value: Any) -> Any:
    """Returns a nest of dicts and lists of what JSON knows; anything else as text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return _number(str(value))


def _number(text: str) -> float | str:
    """Reads a number, which the manifest has as text; other text stays."""
    try:
        return float(text)
    except ValueError:
        return text
