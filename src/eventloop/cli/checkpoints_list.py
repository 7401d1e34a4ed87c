"""`eventloop checkpoints RUN`: the checkpoints of a run, in a table."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eventloop.checkpoint.locations import best_among, checkpoints_at, why_none
from eventloop.checkpoint.retention import is_replaced
from eventloop.checkpoint.store import FoundCheckpoint, look_at
from eventloop.cli.arguments import JSON, Arguments, Command, CommandOption
from eventloop.cli.checkpoint_rows import cell_text, content, saved, tested_at
from eventloop.cli.named_checkpoints import size_text, uploaded_at, words
from eventloop.cli.printing import write_json, write_table, write_text
from eventloop.safe_text import one_line
from eventloop.urls import place_of

COMMAND = Command(
    "checkpoints list",
    "Lists the checkpoints of a run, the newest first: when each was saved, its size, whether it "
    "verifies, whether it has the best evaluation, its metrics and plugins, the results of the test sets "
    "with its weights, and the reason if the run was stopped there. RUN is a run's folder or URL, or the "
    "`checkpoints` in it.",
    (
        CommandOption("quick", "", "compare only sizes; otherwise all files are read"),
        JSON,
    ),
    argument="RUN",
    takes_plugins=False,
)
_SLOW_BYTES = 2 * 10**9  # takes seconds


def run(arguments: Arguments) -> int:
    """Runs the subcommand."""
    (word,) = words(arguments, COMMAND)
    place = place_of(word)
    is_quick = "quick" in arguments.given
    checkpoints: list[FoundCheckpoint[Any]]
    if isinstance(place, Path):
        checkpoints = list(_checkpoints(checkpoints_at(place), is_quick=is_quick))
    else:
        checkpoints = uploaded_at(place, digests=not is_quick)
    best = best_among(checkpoints)
    tested = tested_at(checkpoints)
    rows = []
    for checkpoint in checkpoints:
        verified = None if is_quick else True
        if checkpoint.damage:
            verified = False
        row = content(checkpoint, verified=verified, tested=tested)
        rows.append({**row, "best": checkpoint is best})
    if "json" in arguments.given:
        write_json(rows)
    elif rows:
        cells = [_cells(*pair) for pair in zip(checkpoints, rows, strict=True)]
        write_table([*cells[0]], [[one_line(text) for text in row.values()] for row in cells])
        name, metrics = tested
        if metrics and not any(row["tested"] for row in rows):
            tested_with = f"{_numbers(metrics)}, with the weights of {name}, which was removed"
            write_text(one_line(f"test sets: {tested_with}"))
    elif isinstance(place, Path):
        write_text(one_line(why_none(place)))
    return 0


def _checkpoints(paths: Sequence[Path], *, is_quick: bool) -> Iterator[FoundCheckpoint[Path]]:
    """Yields the checkpoints of a run, except checkpoints that were replaced or removed meanwhile."""
    unread = [look_at(path, digests=False) for path in paths]
    num_bytes = 0 if is_quick else sum(checkpoint.num_bytes for checkpoint in unread)
    if num_bytes > _SLOW_BYTES:
        sys.stderr.write(f"reading {size_text(num_bytes)}; `--quick` compares only sizes\n")
        sys.stderr.flush()
    undamaged_batches: set[int] = set()
    for checkpoint in unread:
        if not is_quick and not checkpoint.damage:
            checkpoint = look_at(checkpoint.path, digests=True)
        if is_replaced(checkpoint.path) and checkpoint.batch in undamaged_batches:
            continue  # its successor is undamaged
        if checkpoint.damage and not os.path.lexists(checkpoint.path):
            continue  # removed by an active run
        if not checkpoint.damage:
            undamaged_batches.add(checkpoint.batch)
        yield checkpoint


def _cells(checkpoint: FoundCheckpoint[Any], row: dict[str, Any]) -> dict[str, str]:
    saved_at = saved(checkpoint.path)
    plugins = ", ".join(
        f"{cell_text(plugin['name'])} {cell_text(plugin['version'])}".strip()
        for plugin in row["plugins"]
    )
    return {
        "checkpoint": checkpoint.path.name,
        "batch": str(row["batch"]),
        "epochs": "" if row["epoch"] is None else str(row["epoch"]),
        "saved": saved_at.strftime("%Y-%m-%d %H:%M:%S") if saved_at else "",
        "size": size_text(row["bytes"]) if row["bytes"] else "",
        "verified": {True: "yes", False: "no", None: "not read"}[row["verified"]],
        "best": "best" if row["best"] else "",
        "metrics": _numbers(row["metrics"]),
        "tested": _numbers(row["tested"]),
        "plugins": plugins,
        "stopped": cell_text(row["stop_reason"] or ""),
        "reason": row["reason"],
    }


def _numbers(metrics: dict[str, float]) -> str:
    return ", ".join(f"{cell_text(name)} {cell_text(value)}" for name, value in metrics.items())
