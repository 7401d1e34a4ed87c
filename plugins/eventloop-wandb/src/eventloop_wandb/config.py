"""The config of a run at W&B: settings, options and versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def config_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings, options of the task and of the plugins, under the names of their flags.

    W&B shows nested values with dots: `max_duration`, `task.lr`, `mixup.alpha`.

    Args:
        manifest: manifest of a run; see `State.manifest`.
    """
    config = {**manifest.get("settings", {})}
    config["task"] = (manifest.get("task") or {}).get("options") or {}
    for plugin in manifest.get("plugins", ()):
        config[plugin["name"]] = plugin["options"]
    config["versions"] = manifest.get("versions") or {}
    plain: dict[str, Any] = _plain(config)
    return plain


def _plain(value: Any) -> Any:
    """Converts a nest to JSON types; other values become text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(nested) for name, nested in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(nested) for nested in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return _number(str(value))


def _number(text: str) -> float | str:
    """Reads a number, which the manifest has as text; other text stays unchanged."""
    try:
        return float(text)
    except ValueError:
        return text
