"""`eventloop checkpoints RUN`: the checkpoints of a run, in a table."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eventloop.commands import (
    Arguments,
    Command,
    CommandOption,
    FoundCheckpoint,
    best_among,
    checkpoints_at,
    is_replaced,
    look_at,
    one_line,
    place_of,
    size_text,
    uploaded_at,
    why_none,
    words,
    write_json,
    write_table,
    write_text,
)
from eventloop_checkpoints.described import JSON, content, saved, shown, tested_at

COMMAND = Command(
    "checkpoints list",
    "Lists the checkpoints of a run, the newest first: when each was saved, how large it is, whether "
    "it verifies, whether it is of the best evaluation, its metrics and plugins, what the test sets gave with its "
    "weights, and why the run was stopped there. RUN is a run's folder or URL, or the "
    "`checkpoints` in it.",
    (
        CommandOption("quick", "", "compare sizes alone; otherwise all files are read"),
        JSON,
    ),
    argument="RUN",
    takes_plugins=False,
)
_SLOW_BYTES = 2 * 10**9  # takes seconds


def run(arguments: Arguments) -> int:
    """Runs the subcommand."""
    (word,) = words(arguments, COMMAND)
    place, is_quick = place_of(word), "quick" in arguments.given
    looks: list[FoundCheckpoint[Any]] = (
        list(_found(checkpoints_at(place), is_quick=is_quick))
        if isinstance(place, Path)
        else uploaded_at(place, digests=not is_quick)
    )
    best, rows, tested = best_among(looks), [], tested_at(looks)
    for found in looks:
        verified = False if found.damage else None if is_quick else True
        row = content(found, verified=verified, tested=tested)
        rows.append({**row, "best": found is best})
    if "json" in arguments.given:
        write_json(rows)
    elif rows:
        cells = [_cells(*pair) for pair in zip(looks, rows, strict=True)]
        write_table([*cells[0]], [[one_line(text) for text in one.values()] for one in cells])
        name, metrics = tested
        if metrics and not any(row["tested"] for row in rows):
            tested_with = f"{_numbers(metrics)}, with the weights of {name}, which isn't there"
            write_text(one_line(f"test sets: {tested_with}"))
    elif isinstance(place, Path):
        write_text(one_line(why_none(place)))
    return 0


def _found(paths: Sequence[Path], *, is_quick: bool) -> Iterator[FoundCheckpoint[Path]]:
    looks = [look_at(path, digests=False) for path in paths]
    num_bytes = 0 if is_quick else sum(one.num_bytes for one in looks)
    if num_bytes > _SLOW_BYTES:
        sys.stderr.write(f"reading {size_text(num_bytes)}; `--quick` compares sizes alone\n")
        sys.stderr.flush()
    whole: set[int] = set()
    for look in looks:
        found = look if is_quick or look.damage else look_at(look.path, digests=True)
        if is_replaced(found.path) and found.batch in whole:
            continue  # its successor is there
        if found.damage and not os.path.lexists(found.path):
            continue  # removed by a run under way
        if not found.damage:
            whole.add(found.batch)
        yield found


def _cells(found: FoundCheckpoint[Any], row: dict[str, Any]) -> dict[str, str]:
    saved_at = saved(found.path)
    plugins = ", ".join(
        f"{shown(one['name'])} {shown(one['version'])}".strip() for one in row["plugins"]
    )
    return {
        "checkpoint": found.path.name,
        "batch": str(row["batch"]),
        "epochs": "" if row["epoch"] is None else str(row["epoch"]),
        "saved": saved_at.strftime("%Y-%m-%d %H:%M:%S") if saved_at else "",
        "size": size_text(row["bytes"]) if row["bytes"] else "",
        "verified": {True: "yes", False: "no", None: "not read"}[row["verified"]],
        "best": "best" if row["best"] else "",
        "metrics": _numbers(row["metrics"]),
        "tested": _numbers(row["tested"]),
        "plugins": plugins,
        "stopped": shown(row["stop_reason"] or ""),
        "reason": row["reason"],
    }


def _numbers(metrics: dict[str, float]) -> str:
    return ", ".join(f"{shown(name)} {shown(value)}" for name, value in metrics.items())
