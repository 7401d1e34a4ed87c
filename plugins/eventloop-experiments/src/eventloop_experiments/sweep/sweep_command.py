"""`eventloop sweep`: trains with options sampled from ranges, and reports the best."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext

import optuna
from filelock import FileLock

from eventloop import EventloopError
from eventloop.commands import (
    FAILURE,
    Arguments,
    UsageError,
    job_help,
    stdout_to_stderr,
    write_json,
    write_lines,
    write_text,
)
from eventloop_experiments.runs import (
    Metric,
    PinnedCode,
    RunProcesses,
    RunProgress,
    RunsFolder,
    check_rows,
    choose_metric,
    plot_path,
    try_run,
)
from eventloop_experiments.sweep.report import (
    METRIC,
    OBJECTIVE,
    content_of,
    draw,
    header,
    summary,
    write_best,
)
from eventloop_experiments.sweep.storage import (
    STORAGE_VARIABLE,
    make_pruner,
    make_sampler,
    open_storage,
    sqlite_url,
)
from eventloop_experiments.sweep.sweep_request import (
    COMMAND,
    LAST,
    Sweep,
    read_command_line,
    read_sweep,
)
from eventloop_experiments.sweep.trials import TrialRun, Trials

_CODE = "code"  # attribute of a study: the code that its trials train with


def run(argv: Sequence[str]) -> int:
    """Runs the command."""
    arguments, choices = read_command_line(argv)
    if "help" in arguments.given:
        write_text(job_help(arguments, COMMAND))
        return 0
    plot = plot_path(arguments, "eventloop-experiments", ("matplotlib", "sklearn"))
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    as_json = "json" in arguments.given
    with stdout_to_stderr() if as_json else nullcontext():
        sweep = read_sweep(arguments, choices)
        study = _swept(sweep, arguments)
    best = write_best(sweep, study)
    if as_json:
        write_json(content_of(sweep, study, best))
    else:
        write_lines(summary(sweep, study, best))
    if plot is not None and draw(study, plot) and not as_json:
        write_lines([f"drawn: {plot}"])
    return FAILURE if best is None else 0


def _swept(sweep: Sweep, arguments: Arguments) -> optuna.Study:
    """Trains the remaining trials; returns the study.

    Raises:
        KeyboardInterrupt, Terminated: a signal was received; running trials have saved a checkpoint.
    """
    folder = RunsFolder(sweep.folder, "sweep")
    sweep.folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(sweep.folder.with_name(f"{sweep.folder.name}.lock"))
    with lock:  # other workers may start at the same time
        is_allowed = "allow_code_change" in arguments.given
        folder.begin(sweep.description, allow_code=is_allowed)
        storage_url = arguments.given.get("storage") or os.environ.get(STORAGE_VARIABLE)
        url = storage_url or sqlite_url(sweep.folder)
        os.environ[STORAGE_VARIABLE] = url
        storage = open_storage(url)
        study = _study(sweep, arguments, storage)
        code = PinnedCode(sweep.job, "sweep", sweep.folder)
        pinned_code = study.user_attrs.get(_CODE)
        current_code = code.begin(pinned_code, is_allowed=is_allowed)
        if current_code != pinned_code:
            study.set_user_attr(_CODE, current_code)
    trials = Trials(sweep, folder, study, storage, lock, study.user_attrs[METRIC])
    num_left = trials.num_left()
    write_lines(header(sweep, study, num_left))
    progress = RunProgress[TrialRun](sweep.num_trials, sweep.num_trials - num_left)
    processes = RunProcesses[TrialRun](
        folder, jobs=sweep.jobs, threads=sweep.threads, modules=sweep.modules()
    )
    with progress, processes:
        # A killed trial resumes from its checkpoint: keep going until no trial was killed.
        is_left = True
        while is_left and not processes.is_stopped:
            is_left = False
            begun = progress.started(code.guarded(trials.runs()))
            for outcome in code.checked(processes.outcomes(begun), folder):
                mark = trials.end(outcome)
                progress.ended(outcome, sweep.num_trials - trials.num_left(), mark)
                is_left |= outcome.was_killed
    if processes.is_stopped:
        raise processes.stopped(f"{trials.num_left()} trials are left; the same line goes on")
    if code.problem is not None:
        raise code.problem
    return study


def _study(sweep: Sweep, arguments: Arguments, storage: optuna.storages.RDBStorage) -> optuna.Study:
    """Opens the study; creates it after a dry run if it doesn't exist.

    Raises:
        UsageError: the study has another metric or objective.
    """
    sampler = make_sampler(arguments.given.get("sampler"))
    pruner = make_pruner(sweep.pruner)
    names = [study_summary.study_name for study_summary in storage.get_all_studies()]
    requested_metric = arguments.given.get("metric")
    if sweep.study in names:
        study = optuna.load_study(
            study_name=sweep.study, storage=storage, sampler=sampler, pruner=pruner
        )
        _compare(requested_metric, study)
        if (objective := study.user_attrs.get(OBJECTIVE, LAST)) != sweep.objective:
            raise UsageError(
                f"the study {study.study_name!r} is of the {objective} evaluation of each trial, "
                f"not of the {sweep.objective}",
                fix=f"write `--objective {objective}`, or give another `--study NAME`",
            )
        return study
    metric = _metric(sweep, requested_metric)
    study = optuna.create_study(
        study_name=sweep.study,
        storage=storage,
        sampler=sampler,
        pruner=pruner,
        direction="maximize" if metric.higher_is_better else "minimize",
        load_if_exists=True,  # a worker on another machine may have created it
    )
    study.set_user_attr(METRIC, metric.name)
    study.set_user_attr(OBJECTIVE, sweep.objective)
    return study


def _metric(sweep: Sweep, requested_metric: str | None) -> Metric:
    """Returns the metric to optimize, chosen from the metrics of a dry run.

    Raises:
        EventloopError: the task can't be trained.
        UsageError: the metric doesn't define whether higher is better.
    """
    tried = try_run(sweep.fit_line(sweep.first()), sweep.threads)
    if tried.content is None:
        sys.stderr.write(tried.err)
        raise EventloopError(
            f"a dry run with the first values failed with status {tried.status}; nothing was "
            "trained",
            fix="fix what is reported above",
        )
    check_rows(
        {
            " ".join(f"-p {value}" for value in plugin_choice.values()): sweep.fit_line(
                sweep.first(plugin_choice)
            )
            for plugin_choice in sweep.choices()
        },
        jobs=sweep.jobs,
        threads=sweep.threads,
    )
    metric = choose_metric(
        requested_metric,
        tried.content["higher_is_better"],
        test_sets=tried.content["test_sets"],
        checkpoint_best=tried.content["checkpoint_best"],
    )
    if metric.higher_is_better is None:
        raise UsageError(
            f"the metric {metric.name!r} doesn't say whether higher is better",
            fix=f'write `--metric "max {metric.name}"` or `--metric "min {metric.name}"`',
        )
    return metric


def _compare(requested_metric: str | None, study: optuna.Study) -> None:
    name = study.user_attrs.get(METRIC)
    requested_name = (requested_metric or "").rpartition(" ")[2].removeprefix("eval/")
    if name is None or requested_name not in ("", name):
        raise UsageError(
            f"the study {study.study_name!r} is of {name or 'something else'}, not of {requested_metric}",
            fix="give another `--study NAME`, or another --run-dir",
        )
