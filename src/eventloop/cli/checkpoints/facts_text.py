"""What a checkpoint tells of itself, as text and JSON; it may come from a stranger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.checkpoint.manifest import FILE

if TYPE_CHECKING:
    from eventloop.checkpoint.store import Found
    from eventloop.urls import Place

_MOST_SHOWN = 120  # characters of a name


def content(found: Found[Any], *, verified: bool | None) -> dict[str, Any]:
    """Returns what is known of a checkpoint, as JSON can hold it.

    Args:
        verified: None where it wasn't read.
    """
    saved_at = saved(found.path)
    moment = _mapping(found.facts.get("moment"))
    return {
        "checkpoint": str(found.path),
        "batch": found.batch,
        "epoch": _number(moment.get("epoch")),
        "saved": saved_at.isoformat(timespec="seconds") if saved_at else None,
        "bytes": found.num_bytes,
        "verified": verified,
        "finite": finite if isinstance(finite := found.facts.get("finite"), bool) else None,
        "reason": found.reason,
        "metrics": dict(_metrics(found.facts)),
        "plugins": list(_plugins(found.facts)),
    }


def saved(path: Place) -> datetime | None:
    """Returns when a checkpoint was saved: its manifest is written last. None if unknown."""
    if not isinstance(path, Path):
        return None  # few stores tell
    with suppress(OSError, ValueError, OverflowError):
        return datetime.fromtimestamp((path / FILE).lstat().st_mtime).astimezone()
    return None


def size_text(num_bytes: int) -> str:
    """Returns a size in words: "512 bytes", "3.4 MB"."""
    if num_bytes < 1000:
        return f"{num_bytes} bytes"
    size = float(num_bytes)
    for unit in ("kB", "MB", "GB", "TB"):
        size /= 1000
        if size < 999.95 or unit == "TB":
            break
    return f"{size:,.1f} {unit}"


def shown(value: object) -> str:
    """Returns a number or text for a cell of a table."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _metrics(facts: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    for name, value in _mapping(facts.get("metrics")).items():
        number = _number(value)
        if isinstance(name, str) and number is not None:
            yield name, number


def _plugins(facts: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    plugins = _mapping(facts.get("manifest")).get("plugins")
    for one in plugins if isinstance(plugins, list) else ():
        told = {key: _mapping(one).get(key) for key in ("name", "version", "role")}
        if isinstance(told["name"], str):
            yield {key: value if isinstance(value, str) else "" for key, value in told.items()}


def _mapping(value: object) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: object) -> int | float | None:
    """Returns a number; None for anything else, and for ints that Python may refuse to write."""
    if isinstance(value, float) or (type(value) is int and abs(value) < 2**63):
        return value
    return None
