"""The result of a check: a table, a line for each cause, or JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from eventloop.commands import counted, write_lines, write_table
from eventloop.toolbox import first_of
from eventloop_check.check_loss.loss_check import Report, Row

_MOST_PLACES = 3


def write_report(report: Report) -> None:
    """Writes the table, and what explains it."""
    write_lines(_header(report))
    several = len(report.whole.updates) > 1
    rows = [_cells(row, several) for row in report.rows]
    write_table(("", "result", "loss", "gradient", "rest"), rows)
    write_lines(_explained(report))


def content_of(task: str, report: Report) -> dict[str, Any]:
    """Returns the report as JSON can hold it."""
    whole = report.whole
    return {
        "task": task,
        "succeeds": report.succeeds,
        "samples": whole.samples,
        "losses": [one.loss for one in whole.updates],
        "dropout_off": list(whole.dropouts),
        "draws": list(whole.draws),
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
    whole = report.whole
    losses = ", ".join(f"{one.loss:.6g}" for one in whole.updates[:_MOST_PLACES])
    losses += ", ..." if len(whole.updates) > _MOST_PLACES else ""
    of = f"{counted(whole.samples, 'sample')}" if whole.samples else "no data loader"
    yield f"one batch in one piece: {of}, loss {losses or 'unseen'}"
    if whole.dropouts:
        yield f"dropout is off, to compare what it would draw anew: {_places(whole.dropouts)}"
    if whole.draws:
        yield f"random numbers: {_places(whole.draws)}"
    yield ""


def _places(several: Iterable[str]) -> str:
    return first_of(several, _MOST_PLACES, "; ")


def _cells(row: Row, several: bool) -> tuple[str, ...]:
    """Returns a line of the table; where the batch makes several updates, with the number of one."""
    title = row.variant.title
    update = row.update
    if update is None or update.compared is None:
        return (title, row.result, "", "", "")
    compared = update.compared
    return (
        f"{title}, update {update.idx + 1}" if several else title,
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
    """Yields what the table doesn't show: causes, reasons, and a summary."""
    if any(row.update is not None for row in report.rows):
        yield ""
        yield "loss, gradient: by which factor they differ; rest: what it leaves of the gradient"
    found = ((row.cause, row) for row in report.rows if row.result == "differs")
    for cause, rows in _grouped(found):
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
    found = [
        f"{num} {plural if num != 1 else result}"
        for plural, result in names
        if (num := results.count(result))  # type: ignore[arg-type]
    ]
    return f"check-loss: {', '.join(found) or 'nothing could be compared'}"


def _titles(rows: Iterable[Row]) -> str:
    return ", ".join(row.variant.title for row in rows)


def _grouped(pairs: Iterable[tuple[Any, Row]]) -> list[tuple[Any, list[Row]]]:
    """Groups rows by what they have in common, in the order of the first of each."""
    groups: dict[Any, list[Row]] = {}
    for key, row in pairs:
        groups.setdefault(key, []).append(row)
    return list(groups.items())
