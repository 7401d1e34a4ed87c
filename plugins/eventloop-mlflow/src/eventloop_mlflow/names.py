"""Names and values as MLflow accepts them."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

# MLflow accepts 250 characters; some stores count bytes.
_MOST_CHARS = 240
_MOST_VALUE_CHARS = 6000
# MLflow accepts 1000 per request, and 1 MB.
POINTS_AT_ONCE = 500
_OTHER = re.compile(r"[^0-9A-Za-z_./ -]")


class Point(NamedTuple):
    """A number with its name, its batch, and the time when it was logged.

    Args:
        time_ms: milliseconds since 1970.
    """

    name: str
    value: float
    step: int
    time_ms: int


def accepted_name(name: str) -> str:
    """Returns a valid MLflow name for a metric or parameter: unchanged if possible.

    Valid are letters, digits, `_`, `-`, `.`, and blanks and slashes between them. Anything else becomes
    `_`, followed by a digest of the name, so that two names never become the same.
    """
    segments = _OTHER.sub("_", name).split("/")
    accepted = "/".join("_" if segment in ("", ".", "..") else segment for segment in segments)
    if accepted == name and len(name) <= _MOST_CHARS:
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{accepted[: _MOST_CHARS - 9]}-{digest}"


def artifact_of(name: str, text: str | Mapping[str, Sequence[Any]], batch: int) -> tuple[str, str]:
    """Returns the path and the content of a text, or of a table as JSON, which MLflow shows as a table."""
    path = f"texts/{accepted_name(name)}/{batch:08}"
    if isinstance(text, str):
        return f"{path}.txt", text.encode("utf-8", "replace").decode()
    columns = [
        [cell if _is_json(cell) else str(cell) for cell in column] for column in text.values()
    ]
    rows = [*zip(*columns, strict=True)]
    return f"{path}.json", json.dumps({"columns": [*text], "data": rows})


def parameters(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Returns settings, options of the task, and options of plugins, flattened, under the names of their flags.

    Args:
        manifest: manifest of a run; see `State.manifest`.
    """
    options = dict(_flat("", manifest.get("settings", {})))
    options |= _flat("task.", (manifest.get("task") or {}).get("options") or {})
    for plugin in manifest.get("plugins", ()):
        options |= _flat(f"{plugin['name']}.", plugin["options"])
    return options


def tags(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tags of a run in MLflow: commit, command line, plugins, versions."""
    git = manifest.get("git") or {}
    plugins = [
        f"{plugin['name']} {plugin['version'] or ''}".strip()
        for plugin in manifest.get("plugins", ())
    ]
    values = {
        "mlflow.source.name": shlex.join(manifest.get("command_line", ())),
        "mlflow.source.git.commit": git.get("commit"),
        "eventloop.git_dirty": git.get("dirty"),
        "eventloop.plugins": ", ".join(plugins) or "none",
        "eventloop.order": manifest.get("order"),
    }
    versions = (manifest.get("versions") or {}).items()
    values |= {f"eventloop.version.{name}": version for name, version in versions}
    return {
        name: str(value)[:_MOST_VALUE_CHARS] for name, value in values.items() if value is not None
    }


def plain(value: Any) -> Any:
    """Returns a nest with dicts and lists, for JSON."""
    if isinstance(value, Mapping):
        return {name: plain(nested) for name, nested in value.items()}
    return [plain(nested) for nested in value] if isinstance(value, list | tuple) else value


def _is_json(cell: Any) -> bool:
    return not isinstance(cell, float) or math.isfinite(cell)


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if value is not None:
            yield accepted_name(f"{prefix}{name}"), str(value)[:_MOST_VALUE_CHARS]
