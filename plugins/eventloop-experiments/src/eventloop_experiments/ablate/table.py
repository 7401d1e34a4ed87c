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
    """The results of a variant.

    Args:
        values: the metric by seed, for runs that have it.
        differences: paired differences to other rows, by the rows' names.
        step_s: median over the seeds of the median time of a step.
        memory_bytes: maximum of its runs' peak memory.
        outcomes: the outcome for each seed.
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
    values = {variant.name: _values(variant, outcomes, metric) for variant in variants}
    rows = []
    for variant in variants:
        row_outcomes = tuple(outcome for outcome in outcomes if outcome.run.variant == variant)
        results = [outcome.content for outcome in row_outcomes if outcome.content is not None]
        steps = [result["step_s"] for result in results if result["step_s"] is not None]
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
                max((result["peak_memory_bytes"] for result in results), default=None),
                row_outcomes,
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
        yield f"in all runs: {', '.join(plugin.name for plugin in ablation.always_on)}"
    if ablation.always_off:
        names_off = ", ".join(plugin.name for plugin in ablation.always_off)
        yield f"in no run: {names_off}, which `--keep` would take into all"
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
    """Yields the notes below the table."""
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
        for outcome in row.outcomes:
            if outcome.content is None:
                yield f"failed: {outcome.run}: {outcome.reason}; {outcome.log}"


def content_of(ablation: Ablation, rows: Sequence[Row], metric: Metric) -> dict[str, Any]:
    """Returns the table as JSON-serializable data."""
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
                    base: None if difference is None else asdict(difference)
                    for base, difference in row.differences.items()
                },
                "step_s": row.step_s,
                "peak_memory_bytes": row.memory_bytes,
                "runs": [_run(outcome, row.values) for outcome in row.outcomes],
            }
            for row in rows
        ],
    }


def _values(
    variant: Variant, outcomes: Sequence[AblationOutcome], metric: Metric
) -> dict[int, float]:
    """Returns the metric by seed; a value that isn't finite is NaN."""
    values = {}
    for outcome in outcomes:
        if outcome.run.variant != variant or outcome.content is None:
            continue
        metrics = outcome.content["metrics"]
        if metric.name in metrics:
            value = metrics[metric.name]
            # JSON has no NaN or infinity: the result file has null for both.
            values[outcome.run.seed] = math.nan if value is None else value
    return values


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
    """Yields the algorithms that disabled themselves in a run, with their reasons."""
    if outcome.content is not None:
        for name in outcome.run.variant.algorithms:
            if (reason := outcome.content["off"].get(name)) is not None:
                yield name, one_line(reason)


def _digits(rows: Sequence[Row]) -> int:
    """Returns the number of decimal digits that show the smallest deviation with two significant digits.

    Without any deviation, the smallest mean with four significant digits.
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
    completed = "" if num_seeds == num_all else f" ({num_seeds} of {num_all} seeds)"
    return f"{row.mean:.{digits}f}{spread}{completed}"


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    milliseconds = seconds * 1000
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:#.3g} ms"


def _difference(difference: Difference | None, digits: int) -> str:
    if difference is None:
        return ""
    if difference.low is None or difference.high is None:
        return f"{difference.mean:+.{digits}f}"
    mark = "*" if difference.leaves_zero_out else ""
    return f"{difference.mean:+.{digits}f} [{difference.low:+.{digits}f}, {difference.high:+.{digits}f}]{mark}"
