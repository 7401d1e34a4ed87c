"""The result of a check: a table, a line for each cause, or JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from eventloop.commands import counted, write_lines, write_table
from eventloop.toolbox import first_of
from eventloop_check.check_loss.loss_check import Report, Row

_MAX_PLACES = 3


def write_report(report: Report) -> None:
    """Writes the table and the explanations below it."""
    write_lines(_header(report))
    has_several_updates = len(report.whole.updates) > 1
    rows = [_cells(row, has_several_updates) for row in report.rows]
    write_table(("", "result", "loss", "gradient", "rest"), rows)
    write_lines(_explained(report))


def content_of(task: str, report: Report) -> dict[str, Any]:
    """Returns the report as JSON-serializable data."""
    single_piece = report.whole
    return {
        "task": task,
        "succeeds": report.succeeds,
        "samples": single_piece.samples,
        "losses": [update.loss for update in single_piece.updates],
        "dropout_off": list(single_piece.dropouts),
        "draws": list(single_piece.draws),
        "declared_but_kept": list(report.unneeded),
        "rows": [_content(row) for row in report.rows],
    }


def _content(row: Row) -> dict[str, Any]:
    compared = None if row.update is None else row.update.compared
    return {
        "name": row.variant.name,
        "law": row.variant.law,
        "title": row.variant.title,
        "result": row.result,
        "loss": None if compared is None else compared.loss,
        "reference": None if compared is None else compared.reference,
        "loss_factor": None if compared is None else compared.loss_factor,
        "gradient_factor": None if compared is None else compared.scale,
        "gradient_rest": None if compared is None else compared.residual,
        "same_outputs": None if row.update is None else row.update.same_outputs,
        "cause": None if row.cause is None else asdict(row.cause),
        "update": None if row.update is None else row.update.idx,
        "reason": row.reason or None,
    }


def _header(report: Report) -> Iterator[str]:
    single_piece = report.whole
    losses = ", ".join(f"{update.loss:.6g}" for update in single_piece.updates[:_MAX_PLACES])
    losses += ", ..." if len(single_piece.updates) > _MAX_PLACES else ""
    size = (
        f"{counted(single_piece.samples, 'sample')}" if single_piece.samples else "no data loader"
    )
    yield f"one batch in one piece: {size}, loss {losses or 'unseen'}"
    if single_piece.dropouts:
        yield f"dropout is off, to compare what it would draw anew: {_places(single_piece.dropouts)}"
    if single_piece.draws:
        yield f"random numbers: {_places(single_piece.draws)}"
    yield ""


def _places(places: Iterable[str]) -> str:
    return first_of(places, _MAX_PLACES, "; ")


def _cells(row: Row, has_several_updates: bool) -> tuple[str, ...]:
    """Returns a line of the table; if a batch makes several updates, with the number of the update."""
    title = row.variant.title
    update = row.update
    if update is None or update.compared is None:
        return (title, row.result, "", "", "")
    compared = update.compared
    return (
        f"{title}, update {update.idx + 1}" if has_several_updates else title,
        row.result,
        _factor(compared.loss_factor),
        _factor(compared.scale),
        f"{100 * compared.residual:.1f} %",
    )


def _factor(value: float) -> str:
    if not math.isfinite(value):
        return "not finite"
    short = f"{value:.4g}"
    return f"x {value:.6g}" if short == "1" else f"x {short}"


def _explained(report: Report) -> Iterator[str]:
    """Yields the lines below the table: causes, reasons, and a summary."""
    if any(row.update is not None for row in report.rows):
        yield ""
        yield "loss, gradient: by which factor they differ; rest: what it leaves of the gradient"
    causes = ((row.cause, row) for row in report.rows if row.result == "differs")
    for cause, rows in _grouped(causes):
        yield ""
        yield f"{_titles(rows)}: {cause.text}"
        yield f"  fix  {cause.fix}"
    notes = [
        *_noted(report, "failed", "failed"),
        *_noted(report, "declared", "declared"),
        *_noted(report, "not tried", "not tried"),
    ]
    yield ""
    yield from notes
    for law in report.unneeded:
        yield f"declared, but kept: {law}"
    yield _sum(report)


def _noted(report: Report, result: str, word: str) -> Iterator[str]:
    pairs = ((row.reason, row) for row in report.rows if row.result == result)
    for reason, rows in _grouped(pairs):
        yield f"{word}: {_titles(rows)}: {reason}"


def _sum(report: Report) -> str:
    results = [row.result for row in report.rows]
    names = ("hold", "holds"), ("differ", "differs"), ("failed",) * 2, ("declared",) * 2
    counts = [
        f"{num} {plural if num != 1 else result}"
        for plural, result in names
        if (num := results.count(result))  # type: ignore[arg-type]
    ]
    return f"check-loss: {', '.join(counts) or 'nothing could be compared'}"


def _titles(rows: Iterable[Row]) -> str:
    return ", ".join(row.variant.title for row in rows)


def _grouped(pairs: Iterable[tuple[Any, Row]]) -> list[tuple[Any, list[Row]]]:
    """Groups rows by key, in the order in which the keys first occur."""
    groups: dict[Any, list[Row]] = {}
    for key, row in pairs:
        groups.setdefault(key, []).append(row)
    return list(groups.items())
