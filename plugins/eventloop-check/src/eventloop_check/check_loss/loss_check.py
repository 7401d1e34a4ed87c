"""The check: runs the variants that can be tried, and judges the results."""

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
# By the variant's name: the measurement of its run, or the reason why it failed.
Measured = Mapping[str, Measurement | str]
Measure = Callable[[Sequence[Variant]], Measured]


@dataclass(frozen=True)
class Row:
    """The result of a variant.

    Args:
        update: the first update that differs.
        cause: its likely cause.
        reason: why the variant wasn't tried or failed, or the declared reason.
    """

    variant: Variant
    result: Result
    update: Update | None = None
    cause: Cause | None = None
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """The results of a check.

    Args:
        whole: measurement of the batch in a single piece.
        unneeded: laws that are declared as not kept, but are kept.
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
    """Compares the loss of a batch in a single piece with the loss of each variant.

    Args:
        measure: runs variants, independently of each other, and returns their measurements.
        declared: laws that the task doesn't keep, with the reasons.

    Raises:
        EventloopError: training on the batch in a single piece fails.
    """
    single_piece = measure([WHOLE])[WHOLE.name]
    if isinstance(single_piece, str):
        raise EventloopError(
            f"the batch in one piece fails: {single_piece}",
            fix="see that `eventloop fit TASK --dry-run` works",
        )
    untried = {}
    for variant in COMPARED:
        if reason := obstacle(variant, single_piece):
            untried[variant.name] = reason
    tried = [variant for variant in COMPARED if variant.name not in untried]
    if not single_piece.unpacked and single_piece.updates:
        tried.append(DOCUMENTS)
    if single_piece.draws and single_piece.updates:
        tried.append(OTHER_DRAWS)
    # Variants of unequal lengths are compared with the run SHORT, which has to come first.
    with_short = [variant for variant in tried if variant.reference == SHORT.name]
    references = [SHORT] if with_short else []
    measured = dict(measure([*references, *set_minus(tried, with_short)]))
    if with_short and isinstance(failure := measured[SHORT.name], str):
        measured |= dict.fromkeys((variant.name for variant in with_short), failure)
    elif with_short:
        measured |= measure(with_short)
    rows = _judged(tried, measured, single_piece)
    rows += [
        Row(variant, "not tried", reason=untried[variant.name])
        for variant in COMPARED
        if variant.name in untried
    ]
    rows.sort(key=lambda row: [*COMPARED, DOCUMENTS, OTHER_DRAWS].index(row.variant))
    return Report(
        single_piece, [_declared(row, declared) for row in rows], _unneeded(rows, declared)
    )


def set_minus(variants: Iterable[Variant], excluded: Iterable[Variant]) -> list[Variant]:
    """Returns the variants that aren't excluded, in order."""
    excluded_set = set(excluded)
    return [variant for variant in variants if variant not in excluded_set]


def obstacle(variant: Variant, single_piece: Measurement) -> str:
    """Returns the reason why a variant can't be tried; "" if it can."""
    if not single_piece.updates:
        return "the task trains without the loop's updates, so that no loss was seen"
    # A plugin that replaces `train_batch` may use other batches than the data loader's.
    samples = max(part.sizes["samples"] for update in single_piece.updates for part in update.parts)
    if variant.microbatch_size and samples <= variant.microbatch_size:
        return f"the batch has {counted(samples, 'sample')}" if samples else _NO_BATCH
    if variant.law == PADDING:
        return single_piece.unpadded
    if variant.law == RANKS and not single_piece.samples:
        return ""  # without a data loader, each rank trains on the task's own data
    if variant.law in (RANKS, ORDER):
        single_sample = "the batch has 1 sample" if single_piece.samples == 1 else ""
        return single_piece.unpicked or single_sample
    return ""


def _judged(tried: Iterable[Variant], measured: Measured, single_piece: Measurement) -> list[Row]:
    """Returns a row for each variant that was tried."""
    differing = {variant.name: _first_that_differs(measured[variant.name]) for variant in tried}
    is_random = differing.get(OTHER_DRAWS.name) is not None
    # Causes look at the other variants; with random draws a difference there shows nothing.
    siblings = {
        name: update
        for name, update in differing.items()
        if not isinstance(measured[name], str) and not is_random
    }
    num_expected = len(single_piece.updates)
    rows = []
    for variant in tried:
        measurement = measured[variant.name]
        update = differing[variant.name]
        if isinstance(measurement, str):
            rows.append(Row(variant, "failed", reason=measurement))
        elif len(measurement.updates) != num_expected:
            num_updates = len(measurement.updates)
            reason = f"{num_updates} updates were made, {num_expected} in one piece"
            rows.append(Row(variant, "failed", reason=reason))
        elif update is None:
            rows.append(Row(variant, "holds"))
        elif is_random and variant.law != DRAWS:
            rows.append(Row(variant, "not tried", reason="the passes draw random numbers"))
        else:
            cause = cause_of(variant, update, single_piece, siblings)
            rows.append(Row(variant, "differs", update, cause))
    return rows


def _first_that_differs(measured: Measurement | str) -> Update | None:
    updates = () if isinstance(measured, str) else measured.updates
    return next(
        (update for update in updates if update.compared and not update.compared.holds), None
    )


def _declared(row: Row, declared: Mapping[str, str]) -> Row:
    if row.result not in ("differs", "failed") or row.variant.law not in declared:
        return row
    return replace(row, result="declared", reason=declared[row.variant.law])


def _unneeded(rows: Iterable[Row], declared: Mapping[str, str]) -> list[str]:
    results: dict[str, set[Result]] = {}
    for row in rows:
        results.setdefault(row.variant.law, set()).add(row.result)
    return [law for law in declared if results.get(law) == {"holds"}]
