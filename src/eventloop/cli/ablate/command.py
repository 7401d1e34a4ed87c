"""`eventloop ablate`: what each algorithm is worth, shown by runs with and without it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from eventloop.cli.ablate.folder import Folder
from eventloop.cli.ablate.metric import choose_metric
from eventloop.cli.ablate.picture import draw, require_matplotlib
from eventloop.cli.ablate.processes import run_all, tried
from eventloop.cli.ablate.progress import Progress
from eventloop.cli.ablate.request import COMMAND, Ablation, read_ablation
from eventloop.cli.ablate.runs import Outcome, runs_of
from eventloop.cli.ablate.table import content_of, footnotes, header, rows_of, write_rows
from eventloop.cli.arguments import Arguments, read_arguments
from eventloop.cli.job import job_help, output_path, prepare
from eventloop.cli.output import stdout_to_stderr, write_json, write_lines, write_text
from eventloop.errors import EventloopError
from eventloop.failing.reports import FAILURE


def run(argv: Sequence[str]) -> int:
    """Runs the command."""
    arguments = read_arguments(argv, COMMAND)
    if "help" in arguments.given:
        write_text(job_help(arguments, COMMAND))
        return 0
    plot = output_path(arguments, "plot", ".png")
    if plot is not None:
        require_matplotlib()
    as_json = "json" in arguments.given
    with stdout_to_stderr() if as_json else nullcontext():
        ablation = read_ablation(arguments, prepare(arguments, COMMAND))
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
    return FAILURE if any(one.reason for one in outcomes) else 0


def _outcomes(
    ablation: Ablation, arguments: Arguments
) -> tuple[list[Outcome], Mapping[str, bool | None]]:
    """Trains what isn't trained yet; gives what came of all, and which metrics there are."""
    folder = Folder(ablation.folder)
    folder.begin(ablation.description)
    runs = runs_of(ablation)
    with folder.held():
        done = [one for one in map(folder.outcome, runs) if one is not None]
        write_lines(header(ablation, len(runs), len(done)))
        metrics = _metrics(ablation, done)
        choose_metric(arguments.given.get("metric"), metrics)  # before hours are spent on it
        known = {one.run for one in done}
        waiting = [one for one in runs if one not in known]
        with Progress(len(runs), len(done)) as progress:
            done += run_all(waiting, ablation, folder, progress)
    by_run = {one.run: one for one in done}
    return [by_run[one] for one in runs], metrics


def _metrics(ablation: Ablation, done: Sequence[Outcome]) -> Mapping[str, bool | None]:
    """Gives the metrics of the task, and whether higher is better; from a dry run at first.

    Raises:
        EventloopError: the task can't be trained even without the algorithms.
    """
    content: Mapping[str, Any] | None = done[0].content if done else None
    if content is None:
        status, text, content = tried(ablation)
        if content is None:
            sys.stderr.write(text)
            raise EventloopError(
                f"a dry run without the algorithms failed with status {status}; nothing was trained",
                fix="mend what is told above; `--keep NAME` keeps an algorithm that the task needs",
            )
    known: Mapping[str, bool | None] = content["higher_is_better"]
    return known
