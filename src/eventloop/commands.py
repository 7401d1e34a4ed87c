"""What commands of packages are made of: a command line, a job, and output."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eventloop.checkpoint.run_lock import RunLock
    from eventloop.cli.arguments import (
        Arguments,
        Command,
        CommandOption,
        command_help,
        read_arguments,
    )
    from eventloop.cli.job import Job, job_help, output_path, prepare
    from eventloop.cli.mode_flags import FIT_OPTIONS
    from eventloop.cli.output import (
        stdout_to_stderr,
        write_json,
        write_lines,
        write_table,
        write_text,
    )
    from eventloop.cli.task_file import load_task_file
    from eventloop.config.options import flag
    from eventloop.distributed.exit import FAILURE, ending_with_parent
    from eventloop.errors import UsageError, a, closest, counted
    from eventloop.naming import fold, plain
    from eventloop.plugin.candidates import Candidates
    from eventloop.plugin.load import Loaded
    from eventloop.plugin.lock import file_digests
    from eventloop.run.differences import (
        config_differences,
        plugin_differences,
        task_differences,
    )
    from eventloop.signals import Interrupted, Terminated
    from eventloop.text import one_line
    from eventloop.urls import place_of

# Imported when it is first asked for: not every command needs torch.
_MODULES = {
    name: module
    for module, names in {
        "eventloop.checkpoint.run_lock": "RunLock",
        "eventloop.cli.arguments": "Arguments Command CommandOption command_help read_arguments",
        "eventloop.cli.job": "Job job_help output_path prepare",
        "eventloop.cli.mode_flags": "FIT_OPTIONS",
        "eventloop.cli.output": "stdout_to_stderr write_json write_lines write_table write_text",
        "eventloop.cli.task_file": "load_task_file",
        "eventloop.config.options": "flag",
        "eventloop.distributed.exit": "FAILURE ending_with_parent",
        "eventloop.errors": "UsageError a closest counted",
        "eventloop.naming": "fold plain",
        "eventloop.plugin.candidates": "Candidates",
        "eventloop.plugin.load": "Loaded",
        "eventloop.plugin.lock": "file_digests",
        "eventloop.run.differences": "config_differences plugin_differences task_differences",
        "eventloop.signals": "Interrupted Terminated",
        "eventloop.text": "one_line",
        "eventloop.urls": "place_of",
    }.items()
    for name in names.split()
}
__all__ = [
    "FAILURE",
    "FIT_OPTIONS",
    "Arguments",
    "Candidates",
    "Command",
    "CommandOption",
    "Interrupted",
    "Job",
    "Loaded",
    "RunLock",
    "Terminated",
    "UsageError",
    "a",
    "closest",
    "command_help",
    "config_differences",
    "counted",
    "ending_with_parent",
    "file_digests",
    "flag",
    "fold",
    "job_help",
    "load_task_file",
    "one_line",
    "output_path",
    "place_of",
    "plain",
    "plugin_differences",
    "prepare",
    "read_arguments",
    "stdout_to_stderr",
    "task_differences",
    "write_json",
    "write_lines",
    "write_table",
    "write_text",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'eventloop.commands' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
