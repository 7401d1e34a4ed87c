"""`eventloop ablate`: measures each algorithm's effect by runs with and without it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from eventloop import EventloopError
from eventloop.commands import (
    FAILURE,
    Arguments,
    job_help,
    prepare,
    stdout_to_stderr,
    write_json,
    write_lines,
    write_text,
)
from eventloop_experiments.ablate.ablation_request import (
    COMMAND,
    Ablation,
    read_ablation,
    read_command_line,
)
from eventloop_experiments.ablate.ablation_runs import AblationOutcome, Run, fit_line, runs_of
from eventloop_experiments.ablate.table import content_of, footnotes, header, rows_of, write_rows
from eventloop_experiments.ablate.table_picture import draw
from eventloop_experiments.runs import (
    PinnedCode,
    RunProcesses,
    RunProgress,
    RunsFolder,
    check_rows,
    choose_metric,
    plot_path,
    try_run,
)

_CODE = "code.json"  # the code that the runs train with


def run(argv: Sequence[str]) -> int:
    """Runs the command."""
    arguments, variants = read_command_line(argv)
    if "help" in arguments.given:
        write_text(job_help(arguments, COMMAND))
        return 0
    plot = plot_path(arguments, "eventloop-experiments")
    as_json = "json" in arguments.given
    with stdout_to_stderr() if as_json else nullcontext():
        ablation = read_ablation(arguments, prepare(arguments, COMMAND), variants)
        outcomes, metrics = _outcomes(ablation, arguments)
    metric = choose_metric(arguments.given.get("metric"), metrics)
    rows = rows_of(ablation, outcomes, metric)
    if as_json:
        write_json(content_of(ablation, rows, metric))
    else:
        write_rows(rows, metric)
        write_lines(footnotes(ablation, rows, metric))
    if plot is not None:
        draw(rows, metric, plot)
    return FAILURE if any(outcome.reason for outcome in outcomes) else 0


def _outcomes(
    ablation: Ablation, arguments: Arguments
) -> tuple[list[AblationOutcome], Mapping[str, bool | None]]:
    """Trains the runs that aren't done yet; returns the outcomes of all runs, and the metrics."""
    folder = RunsFolder(ablation.folder, "ablation")
    is_allowed = "allow_code_change" in arguments.given
    folder.begin(ablation.description, allow_code=is_allowed)
    code = PinnedCode(ablation.job, "ablation", ablation.folder)
    folder.keep(_CODE, code.begin(folder.read(_CODE), is_allowed=is_allowed))
    runs = runs_of(ablation)
    with folder.held():
        outcomes = [outcome for outcome in map(folder.outcome, runs) if outcome is not None]
        write_lines(header(ablation, len(runs), len(outcomes)))
        metrics = _metrics(ablation, outcomes)
        choose_metric(arguments.given.get("metric"), metrics)  # fails before hours of training
        done = {outcome.run for outcome in outcomes}
        waiting = [run for run in runs if run not in done]
        progress = RunProgress[Run](len(runs), len(outcomes))
        outcomes += _trained(waiting, ablation, folder, code, progress)
    by_run = {outcome.run: outcome for outcome in outcomes}
    return [by_run[run] for run in runs], metrics


def _trained(
    waiting: Sequence[Run],
    ablation: Ablation,
    folder: RunsFolder,
    code: PinnedCode,
    progress: RunProgress[Run],
) -> list[AblationOutcome]:
    """Trains the runs; returns their outcomes, in the order in which they ended.

    Raises:
        KeyboardInterrupt, Terminated: a signal was received; running runs have saved a checkpoint.
    """
    outcomes = []
    processes = RunProcesses[Run](folder, jobs=ablation.jobs, threads=ablation.threads)
    with progress, processes:
        begun = progress.started(code.guarded(waiting))
        for outcome in code.checked(processes.outcomes(begun), folder):
            outcomes.append(outcome)
            progress.ended(outcome)
    if code.problem is not None and not processes.is_stopped:
        raise code.problem
    num_left = len(waiting) - len(outcomes)
    if num_left:
        raise processes.stopped(f"{num_left} runs are left; the same line goes on")
    return outcomes


def _metrics(ablation: Ablation, outcomes: Sequence[AblationOutcome]) -> Mapping[str, bool | None]:
    """Returns the task's metrics and whether higher is better, from a finished run or a dry run.

    Raises:
        EventloopError: the task can't be trained even without the algorithms.
    """
    content: Mapping[str, Any] | None = outcomes[0].content if outcomes else None
    if content is None:
        status, err, content = try_run(fit_line(ablation, ablation.variants[0]), ablation.threads)
        if content is None:
            sys.stderr.write(err)
            raise EventloopError(
                f"a dry run without the algorithms failed with status {status}; nothing was trained",
                fix="fix what is reported above; `--keep NAME` keeps an algorithm that the task needs",
            )
        variants = ablation.variants[1:]
        check_rows(
            {variant.name: fit_line(ablation, variant) for variant in variants},
            {variant.name: variant.algorithms for variant in variants},
            jobs=ablation.jobs,
            threads=ablation.threads,
        )
    directions: Mapping[str, bool | None] = content["higher_is_better"]
    return directions
