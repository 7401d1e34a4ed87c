"""Shared by commands that make many runs: the base run, the runs' folder and their processes."""

from eventloop_experiments.runs.base_run import default_folder, describe, fit_argv, share_cores
from eventloop_experiments.runs.command_line import plot_path, read_texts, refuse_own
from eventloop_experiments.runs.metric_choice import Metric, choose_metric
from eventloop_experiments.runs.pinned_code import ALLOW_CODE_CHANGE, PinnedCode
from eventloop_experiments.runs.run_processes import RunProcesses, check_rows, try_run
from eventloop_experiments.runs.run_progress import RunProgress
from eventloop_experiments.runs.runs_folder import Outcome, Run, RunsFolder

__all__ = [
    "ALLOW_CODE_CHANGE",
    "Metric",
    "Outcome",
    "PinnedCode",
    "Run",
    "RunProcesses",
    "RunProgress",
    "RunsFolder",
    "check_rows",
    "choose_metric",
    "default_folder",
    "describe",
    "fit_argv",
    "plot_path",
    "read_texts",
    "refuse_own",
    "share_cores",
    "try_run",
]
