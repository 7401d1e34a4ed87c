"""Describes a checkpoint by what is written in its manifest and in the run's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.commands import CommandOption, read_json
from eventloop.storage import MANIFEST

if TYPE_CHECKING:
    from eventloop.commands import FoundCheckpoint, Place

JSON = CommandOption("json", "", "write JSON instead of text")
_FOLDER = "checkpoints"  # of a run
_MOST_SHOWN = 120  # characters of a name


def tested_at(looks: Sequence[FoundCheckpoint[Any]]) -> tuple[str, dict[str, int | float]]:
    """Returns the name of the checkpoint whose weights a run's test sets used, and the results."""
    manifests = [_mapping(one.facts.get("manifest")) for one in looks]
    if looks and isinstance(looks[0].path, Path) and looks[0].path.parent.name == _FOLDER:
        manifests.insert(0, read_json(looks[0].path.absolute().parents[1], MANIFEST))
    found: Mapping[Any, Any] = next(
        (one["tested"] for one in manifests if _mapping(one.get("tested"))), {}
    )
    batch, name = _number(found.get("batch")), found.get("checkpoint")
    named = (one.path.name for one in looks if one.batch == batch)
    name = name if isinstance(name, str) else next(named, f"batch {batch}")
    return name, dict(_metrics(found))


def content(
    found: FoundCheckpoint[Any],
    *,
    verified: bool | None,
    tested: tuple[str, Mapping[str, int | float]],
) -> dict[str, Any]:
    """Describes a checkpoint as JSON values; `verified` is None if it wasn't read."""
    reason, (name, of_tests) = found.facts.get("stop_reason"), tested
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
        # Older checkpoints have what the test sets gave with the weights of another.
        "metrics": {key: one for key, one in _metrics(found.facts) if key not in of_tests},
        "tested": of_tests if found.path.name == name else {},
        "stop_reason": reason if isinstance(reason, str) else None,
        "status": status if isinstance(status := found.facts.get("status"), str) else None,
        "plugins": list(_plugins(found.facts)),
    }


def saved(path: Place) -> datetime | None:
    """Returns when a checkpoint's manifest, its last file, was written; None if unknown."""
    if not isinstance(path, Path):
        return None  # few stores tell
    with suppress(OSError, ValueError, OverflowError):
        return datetime.fromtimestamp((path / MANIFEST).lstat().st_mtime).astimezone()
    return None


def shown(value: object) -> str:
    """Formats a number or text for a cell of a table."""
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
        fields = {key: _mapping(one).get(key) for key in ("name", "version", "role")}
        if isinstance(fields["name"], str):
            yield {key: value if isinstance(value, str) else "" for key, value in fields.items()}


def _mapping(value: object) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: object) -> int | float | None:
    """Returns a number; None for anything else, and for ints too large for Python to print."""
    if isinstance(value, float) or (type(value) is int and abs(value) < 2**63):
        return value
    return None
