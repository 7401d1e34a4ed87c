"""The check: which variants can be tried, and what came of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from eventloop import EventloopError
from eventloop.commands import counted
from eventloop_check.check_loss.causes import Cause, cause_of
from eventloop_check.check_loss.laws import (
    COMPARED,
    DOCUMENTS,
    DRAWS,
    ORDER,
    OTHER_DRAWS,
    PADDING,
    RANKS,
    SHORT,
    WHOLE,
    Variant,
)
from eventloop_check.check_loss.measurement import Measurement, Update

Result = Literal["holds", "differs", "declared", "not tried", "failed"]
_NO_BATCH = "there is no batch that could be split"
# What a run measured, by the variant's name; why it failed.
Measured = Mapping[str, Measurement | str]
Measure = Callable[[Sequence[Variant]], Measured]


@dataclass(frozen=True)
class Row:
    """What came of a variant.

    Args:
        update: the first that differs.
        cause: why it does, likely.
        reason: why it wasn't tried, why it failed, or what is declared.
    """

    variant: Variant
    result: Result
    update: Update | None = None
    cause: Cause | None = None
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """What came of a check.

    Args:
        whole: the batch in one piece.
        unneeded: laws that are declared as not kept, and are kept.
    """

    whole: Measurement
    rows: Sequence[Row]
    unneeded: Sequence[str]

    @property
    def succeeds(self) -> bool:
        """Whether something was compared, and all of it holds or is declared."""
        results = {row.result for row in self.rows}
        return not results & {"differs", "failed"} and bool(results & {"holds", "declared"})


def check(measure: Measure, declared: Mapping[str, str]) -> Report:
    """Compares the loss of a batch in one piece with that of each variant.

    Args:
        measure: runs variants, each as if by itself, and returns what they measured.
        declared: laws that the task doesn't keep, with the reasons.

    Raises:
        EventloopError: the batch in one piece can't be trained on.
    """
    whole = measure([WHOLE])[WHOLE.name]
    if isinstance(whole, str):
        raise EventloopError(
            f"the batch in one piece fails: {whole}",
            fix="see that `eventloop fit TASK --dry-run` works",
        )
    untried = {one.name: reason for one in COMPARED if (reason := why_not(one, whole))}
    tried = [one for one in COMPARED if one.name not in untried]
    if not whole.unpacked and whole.updates:
        tried.append(DOCUMENTS)
    if whole.draws and whole.updates:
        tried.append(OTHER_DRAWS)
    with_short = [one for one in tried if one.reference == SHORT.name]
    found = dict(measure([*[SHORT][: len(with_short)], *(set_minus(tried, with_short))]))
    if with_short and isinstance(why := found[SHORT.name], str):
        found |= dict.fromkeys((one.name for one in with_short), why)
    else:
        found |= measure(with_short) if with_short else {}
    rows = _judged(tried, found, whole)
    rows += [
        Row(one, "not tried", reason=untried[one.name]) for one in COMPARED if one.name in untried
    ]
    rows.sort(key=lambda row: [*COMPARED, DOCUMENTS, OTHER_DRAWS].index(row.variant))
    return Report(whole, [_declared(row, declared) for row in rows], _unneeded(rows, declared))


def set_minus(variants: Iterable[Variant], others: Iterable[Variant]) -> list[Variant]:
    """Returns the variants that aren't among the others, in order."""
    left_out = set(others)
    return [one for one in variants if one not in left_out]


def why_not(variant: Variant, whole: Measurement) -> str:
    """Returns why a variant can't be tried; "" if it can."""
    if not whole.updates:
        return "the task trains without the loop's updates, so that no loss was seen"
    # An owner of `train_batch` may put batches of its own in the place of the data loader's.
    samples = max(part.sizes["samples"] for one in whole.updates for part in one.parts)
    if variant.microbatch_size and samples <= variant.microbatch_size:
        return f"the batch has {counted(samples, 'sample')}" if samples else _NO_BATCH
    if variant.law == PADDING:
        return whole.unpadded
    if variant.law == RANKS and not whole.samples:
        return ""  # each rank trains on what the task has
    if variant.law in (RANKS, ORDER):
        return whole.unpicked or ("the batch has 1 sample" if whole.samples == 1 else "")
    return ""


def _judged(tried: Iterable[Variant], found: Measured, whole: Measurement) -> list[Row]:
    """Returns a row for each variant that was tried."""
    differing = {one.name: _first_that_differs(found[one.name]) for one in tried}
    is_random = differing.get(OTHER_DRAWS.name) is not None
    known = {
        name: update
        for name, update in differing.items()
        if not isinstance(found[name], str) and not is_random
    }
    rows = []
    for one in tried:
        measured = found[one.name]
        update = differing[one.name]
        if isinstance(measured, str):
            rows.append(Row(one, "failed", reason=measured))
        elif len(measured.updates) != len(whole.updates):
            made = f"{len(measured.updates)} updates were made, {len(whole.updates)} in one piece"
            rows.append(Row(one, "failed", reason=made))
        elif update is None:
            rows.append(Row(one, "holds"))
        elif is_random and one.law != DRAWS:
            rows.append(Row(one, "not tried", reason="the passes draw random numbers"))
        else:
            rows.append(Row(one, "differs", update, cause_of(one, update, whole, known)))
    return rows


def _first_that_differs(measured: Measurement | str) -> Update | None:
    updates = () if isinstance(measured, str) else measured.updates
    return next((one for one in updates if one.compared and not one.compared.holds), None)


def _declared(row: Row, declared: Mapping[str, str]) -> Row:
    if row.result not in ("differs", "failed") or row.variant.law not in declared:
        return row
    return replace(row, result="declared", reason=declared[row.variant.law])


def _unneeded(rows: Iterable[Row], declared: Mapping[str, str]) -> list[str]:
    results: dict[str, set[Result]] = {}
    for row in rows:
        results.setdefault(row.variant.law, set()).add(row.result)
    return [law for law in declared if results.get(law) == {"holds"}]
