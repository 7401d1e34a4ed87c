"""The result of an ablation: a row a variant, as text and as JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eventloop.commands import counted, one_line, write_table
from eventloop_experiments.ablate.ablation_request import Ablation
from eventloop_experiments.ablate.ablation_runs import AblationOutcome
from eventloop_experiments.ablate.paired import Difference, deviation, paired_difference
from eventloop_experiments.ablate.variants import ALL, NONE, Variant
from eventloop_experiments.runs import Metric


@dataclass(frozen=True)
class Row:
    """What came of a variant.

    Args:
        values: the metric by seed, of the runs that have it.
        differences: to other rows, by their names.
        step_s: the median over the seeds of the median time of a step.
        memory_bytes: the most that any of its runs had.
        outcomes: one a seed.
    """

    variant: Variant
    values: Mapping[int, float]
    differences: Mapping[str, Difference | None]
    step_s: float | None
    memory_bytes: int | None
    outcomes: tuple[AblationOutcome, ...]

    @property
    def mean(self) -> float | None:
        """The mean over the seeds."""
        return statistics.fmean(self.values.values()) if self.values else None

    @property
    def std(self) -> float | None:
        """The standard deviation over the seeds, of a sample."""
        return deviation([*self.values.values()]) if len(self.values) > 1 else None


def rows_of(ablation: Ablation, outcomes: Sequence[AblationOutcome], metric: Metric) -> list[Row]:
    """Returns the rows of the table."""
    variants = ablation.variants
    values = {one.name: _values(one, outcomes, metric) for one in variants}
    rows = []
    for variant in variants:
        own = tuple(one for one in outcomes if one.run.variant == variant)
        done = [one.content for one in own if one.content is not None]
        steps = [one["step_s"] for one in done if one["step_s"] is not None]
        rows.append(
            Row(
                variant,
                values[variant.name],
                {
                    base: paired_difference(values[variant.name], values[base])
                    for base in (NONE, ALL)
                    if base in values and base != variant.name
                },
                statistics.median(steps) if steps else None,
                max((one["peak_memory_bytes"] for one in done), default=None),
                own,
            )
        )
    return rows


def header(ablation: Ablation, num_runs: int, num_done: int) -> Iterator[str]:
    """Yields the lines printed before the first run."""
    names = ", ".join(ablation.names)
    seeds = counted(len(ablation.seeds), "seed")
    at_once = f", {ablation.jobs} at a time" if ablation.jobs > 1 else ""
    yield f"ablation: {ablation.arguments.task}, {names}; {num_runs} runs, {seeds}{at_once}"
    if ablation.always_on:
        yield f"in all runs: {', '.join(one.name for one in ablation.always_on)}"
    if ablation.others:
        named = ", ".join(one.name for one in ablation.others)
        yield f"in no run: {named}, which `--keep` would take into all"
    yield f"run dir: {ablation.folder}"
    if num_done:
        yield f"resumed: {num_done} of {num_runs} runs are done"


def write_rows(rows: Sequence[Row], metric: Metric) -> None:
    """Writes the table."""
    bases = [name for name in (NONE, ALL) if any(name in row.differences for row in rows)]
    columns = ("", metric.name, *(f"against {base}" for base in bases), "step", "memory")
    digits = _digits(rows)
    write_table(
        columns,
        [
            (
                row.variant.name,
                _mean(row, digits),
                *(_difference(row.differences.get(base), digits) for base in bases),
                _milliseconds(row.step_s),
                "" if row.memory_bytes is None else f"{row.memory_bytes / 1e6:,.0f} MB",
            )
            for row in rows
        ],
    )


def footnotes(ablation: Ablation, rows: Sequence[Row], metric: Metric) -> Iterator[str]:
    """Yields what a reader of the table needs to know."""
    if metric.higher_is_better is False:
        yield f"{metric.name}: lower is better, and a difference below 0"
    if len(ablation.seeds) > 1:
        yield (
            f"± is the standard deviation over {len(ablation.seeds)} seeds; against another row: the "
            "mean of the differences seed by seed, and its 95 % interval (Student's t); * where that "
            "leaves 0 out"
        )
    else:
        yield "one seed shows no difference: give --seeds 5"
    if ablation.jobs > 1:
        yield f"{ablation.jobs} runs shared the cores: the times are fair with --jobs 1 alone"
    yield from dict.fromkeys(
        f"no part in {outcome.run.variant.name}: {name} ({reason})"
        for row in rows
        for outcome in row.outcomes
        for name, reason in _took_no_part(outcome)
    )
    for row in rows:
        for one in row.outcomes:
            if one.content is None:
                yield f"failed: {one.run}: {one.reason}; {one.log}"


def content_of(ablation: Ablation, rows: Sequence[Row], metric: Metric) -> dict[str, Any]:
    """Returns the table as JSON can hold it."""
    return {
        "task": ablation.arguments.task,
        "metric": metric.name,
        "higher_is_better": metric.higher_is_better,
        "seeds": list(ablation.seeds),
        "jobs": ablation.jobs,
        "run_dir": str(ablation.folder),
        "rows": [
            {
                "name": row.variant.name,
                "algorithms": list(row.variant.algorithms),
                "options": dict(row.variant.options),
                "mean": row.mean,
                "std": row.std,
                "against": {
                    base: None if one is None else asdict(one)
                    for base, one in row.differences.items()
                },
                "step_s": row.step_s,
                "peak_memory_bytes": row.memory_bytes,
                "runs": [_run(one, row.values) for one in row.outcomes],
            }
            for row in rows
        ],
    }


def _values(
    variant: Variant, outcomes: Sequence[AblationOutcome], metric: Metric
) -> dict[int, float]:
    """Returns the metric by seed; one that isn't finite is NaN."""
    return {
        one.run.seed: math.nan if (value := one.content["metrics"][metric.name]) is None else value
        for one in outcomes
        if one.run.variant == variant
        and one.content is not None
        and metric.name in one.content["metrics"]
    }


def _run(outcome: AblationOutcome, values: Mapping[int, float]) -> dict[str, Any]:
    seed = outcome.run.seed
    content = outcome.content or {}
    return {
        "seed": seed,
        "value": values.get(seed),
        "step_s": content.get("step_s"),
        "peak_memory_bytes": content.get("peak_memory_bytes"),
        "failed": outcome.reason or None,
        "log": str(outcome.log),
    }


def _took_no_part(outcome: AblationOutcome) -> Iterator[tuple[str, str]]:
    """Yields the algorithms that took no part in a run by themselves, each with the reason."""
    if outcome.content is not None:
        for name in outcome.run.variant.algorithms:
            if (reason := outcome.content["off"].get(name)) is not None:
                yield name, one_line(reason)


def _digits(rows: Sequence[Row]) -> int:
    """Returns how many digits after the point show two of the smallest deviation.

    Where there is none, four of the smallest mean.
    """
    deviations = [row.std for row in rows if row.std and math.isfinite(row.std)]
    means = [abs(row.mean) for row in rows if row.mean and math.isfinite(row.mean)]
    if not deviations and not means:
        return 4
    size = math.floor(math.log10(min(deviations or means)))
    return min(12, max(0, 1 - size) if deviations else max(4, 3 - size))


def _mean(row: Row, digits: int) -> str:
    if row.mean is None:
        return "failed"
    spread = "" if row.std is None else f" ± {row.std:.{digits}f}"
    num_seeds = len(row.values)
    num_all = len(row.outcomes)
    of = "" if num_seeds == num_all else f" ({num_seeds} of {num_all} seeds)"
    return f"{row.mean:.{digits}f}{spread}{of}"


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    milliseconds = seconds * 1000
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:#.3g} ms"


def _difference(one: Difference | None, digits: int) -> str:
    if one is None:
        return ""
    if one.low is None or one.high is None:
        return f"{one.mean:+.{digits}f}"
    mark = "*" if one.leaves_zero_out else ""
    return f"{one.mean:+.{digits}f} [{one.low:+.{digits}f}, {one.high:+.{digits}f}]{mark}"
