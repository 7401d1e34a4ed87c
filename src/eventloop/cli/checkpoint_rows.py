"""Describes a checkpoint as a row of a table, from its manifest and the run's manifest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.checkpoint.locations import FOLDER
from eventloop.files.run_folder import read_json
from eventloop.storage import MANIFEST

if TYPE_CHECKING:
    from eventloop.checkpoint.store import FoundCheckpoint
    from eventloop.urls import Place

_MOST_SHOWN = 120  # characters of a name


def tested_at(checkpoints: Sequence[FoundCheckpoint[Any]]) -> tuple[str, dict[str, int | float]]:
    """Returns the name of the checkpoint whose weights the test sets used, and their results."""
    manifests = [_mapping(checkpoint.facts.get("manifest")) for checkpoint in checkpoints]
    if checkpoints and isinstance(checkpoints[0].path, Path):
        folder = checkpoints[0].path.absolute().parent
        if folder.name == FOLDER:
            manifests.insert(0, read_json(folder.parent, MANIFEST))
    results: Mapping[Any, Any] = {}
    for manifest in manifests:
        results = _mapping(manifest.get("tested"))
        if results:
            break
    name = results.get("checkpoint")
    if not isinstance(name, str):
        batch = _number(results.get("batch"))
        names = (checkpoint.path.name for checkpoint in checkpoints if checkpoint.batch == batch)
        name = next(names, f"batch {batch}")
    return name, dict(_metrics(results))


def content(
    checkpoint: FoundCheckpoint[Any],
    *,
    verified: bool | None,
    tested: tuple[str, Mapping[str, int | float]],
) -> dict[str, Any]:
    """Describes a checkpoint as JSON values.

    Args:
        checkpoint: its facts aren't trusted.
        verified: whether its files are undamaged; None if they weren't read.
        tested: the result of `tested_at`.
    """
    tested_name, test_metrics = tested
    saved_at = saved(checkpoint.path)
    facts = checkpoint.facts
    moment = _mapping(facts.get("moment"))
    finite = facts.get("finite")
    return {
        "checkpoint": str(checkpoint.path),
        "batch": checkpoint.batch,
        "epoch": _number(moment.get("epoch")),
        "saved": saved_at.isoformat(timespec="seconds") if saved_at else None,
        "bytes": checkpoint.num_bytes,
        "verified": verified,
        "finite": finite if isinstance(finite, bool) else None,
        "reason": checkpoint.reason,
        # Test metrics are listed only with the weights that they were measured on.
        "metrics": {key: value for key, value in _metrics(facts) if key not in test_metrics},
        "tested": test_metrics if checkpoint.path.name == tested_name else {},
        "stop_reason": _text(facts.get("stop_reason")),
        "status": _text(facts.get("status")),
        "plugins": list(_plugins(facts)),
    }


def saved(path: Place) -> datetime | None:
    """Returns the time when a checkpoint's manifest, its last file, was written; None if unknown."""
    if not isinstance(path, Path):
        return None  # few storages have it
    with suppress(OSError, ValueError, OverflowError):
        return datetime.fromtimestamp((path / MANIFEST).lstat().st_mtime).astimezone()
    return None


def cell_text(value: object) -> str:
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
    for plugin in plugins if isinstance(plugins, list) else ():
        fields = {key: _mapping(plugin).get(key) for key in ("name", "version", "role")}
        if isinstance(fields["name"], str):
            yield {key: value if isinstance(value, str) else "" for key, value in fields.items()}


def _mapping(value: object) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: object) -> int | float | None:
    """Returns a number; None for other types, and for ints too large for Python to print."""
    if isinstance(value, float) or (type(value) is int and abs(value) < 2**63):
        return value
    return None
