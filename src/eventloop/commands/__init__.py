"""What commands of packages are made of: a command line, a job, and runs in processes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eventloop.cli.arguments import (
        Arguments,
        Command,
        CommandOption,
        command_help,
        read_arguments,
    )
    from eventloop.cli.job import Job, job_help, output_path, prepare
    from eventloop.cli.output import (
        stdout_to_stderr,
        write_json,
        write_lines,
        write_table,
        write_text,
    )
    from eventloop.commands.base_run import (
        FIT_OPTIONS,
        default_folder,
        describe,
        fit_argv,
        number_option,
        share_cores,
    )
    from eventloop.commands.metric_choice import Metric, choose_metric
    from eventloop.commands.run_processes import RunProcesses, try_run
    from eventloop.commands.run_progress import RunProgress
    from eventloop.commands.runs_folder import Outcome, Run, RunsFolder
    from eventloop.config.options import flag
    from eventloop.distributed.exit import FAILURE
    from eventloop.errors import UsageError, closest, counted
    from eventloop.naming import fold
    from eventloop.plugin.load import Loaded
    from eventloop.text import one_line

__all__ = [
    "FAILURE",
    "FIT_OPTIONS",
    "Arguments",
    "Command",
    "CommandOption",
    "Job",
    "Loaded",
    "Metric",
    "Outcome",
    "Run",
    "RunProcesses",
    "RunProgress",
    "RunsFolder",
    "UsageError",
    "choose_metric",
    "closest",
    "command_help",
    "counted",
    "default_folder",
    "describe",
    "fit_argv",
    "flag",
    "fold",
    "job_help",
    "number_option",
    "one_line",
    "output_path",
    "prepare",
    "read_arguments",
    "share_cores",
    "stdout_to_stderr",
    "try_run",
    "write_json",
    "write_lines",
    "write_table",
    "write_text",
]

# Imported when it is first asked for: not every command needs torch.
_LAZY = {
    "eventloop.cli.arguments": (
        "Arguments",
        "Command",
        "CommandOption",
        "command_help",
        "read_arguments",
    ),
    "eventloop.cli.job": ("Job", "job_help", "output_path", "prepare"),
    "eventloop.cli.output": (
        "stdout_to_stderr", "write_json", "write_lines", "write_table", "write_text",
    ),
    "eventloop.commands.base_run": (
        "FIT_OPTIONS", "default_folder", "describe", "fit_argv", "number_option", "share_cores",
    ),
    "eventloop.commands.metric_choice": ("Metric", "choose_metric"),
    "eventloop.commands.run_processes": ("RunProcesses", "try_run"),
    "eventloop.commands.run_progress": ("RunProgress",),
    "eventloop.commands.runs_folder": ("Outcome", "Run", "RunsFolder"),
    "eventloop.errors": ("UsageError", "closest", "counted"),
    "eventloop.text": ("one_line",),
    "eventloop.distributed.exit": ("FAILURE",),
    "eventloop.config.options": ("flag",),
    "eventloop.plugin.load": ("Loaded",),
    "eventloop.naming": ("fold",),
}  # fmt: skip
_MODULES = {name: module for module, names in _LAZY.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'eventloop.commands' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
