"""The settings and options of a run, for TensorBoard's table of hyperparameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Value = bool | float | str


def hyperparameters(manifest: Mapping[str, Any]) -> dict[str, Value]:
    """Returns settings, options of the task, and options of plugins, flattened, under the names of their flags.

    Args:
        manifest: manifest of a run; see `State.manifest`.
    """
    options = dict(_flat("", manifest.get("settings", {})))
    options.pop("run_dir", None)  # different for each run, and not a hyperparameter
    options |= _flat("task.", (manifest.get("task") or {}).get("options") or {})
    for plugin in manifest.get("plugins", ()):
        options |= _flat(f"{plugin['name']}.", plugin["options"])
    return options


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Value]]:
    for name, value in values.items():
        if isinstance(value, str):
            yield f"{prefix}{name}", _number(value)
        elif isinstance(value, bool | int | float):
            yield f"{prefix}{name}", value
        elif value is not None:
            yield f"{prefix}{name}", str(value)


def _number(text: str) -> Value:
    """Reads a number, which the manifest has as text; other text stays unchanged."""
    try:
        return float(text)
    except ValueError:
        return text
