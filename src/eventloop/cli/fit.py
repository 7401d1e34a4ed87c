"""`eventloop fit`: train a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from eventloop.cli.arguments import (
    CHANGES,
    Arguments,
    Command,
    CommandOption,
    allowed,
    read_arguments,
)
from eventloop.cli.diagnostics import Diagnostics
from eventloop.cli.failure import crash_report
from eventloop.cli.header import header_lines
from eventloop.cli.job import Job, job_help, output_path, prepare, task_settings
from eventloop.cli.launch import OPTION as NPROC
from eventloop.cli.launch import launch
from eventloop.cli.mode_flags import OPTIONS, Modes
from eventloop.cli.output import write_lines, write_text
from eventloop.cli.plugins.lock import require_lock
from eventloop.cli.print_config import config_lines
from eventloop.cli.result import ResultFile
from eventloop.errors import SettingError, counted
from eventloop.run.run_manifest import write_manifest
from eventloop.trainer import TrainerBuilder

if TYPE_CHECKING:
    from eventloop.clock import Clock
    from eventloop.config.configuration import Configuration

COMMAND = Command(
    "fit",
    "Trains a task; installed plugins take part.",
    (
        CommandOption("print-config", "", "write all values with their sources, and stop"),
        CommandOption("export", "FILE.safetensors", "write the trained weights"),
        CommandOption("result", "FILE.json", "write metrics, time a step and memory at the end"),
        CommandOption("unlocked", "", "go without eventloop.lock, where one stands"),
        *CHANGES,
        CommandOption("trace", "FILE.json", "take the time of every hook call, for Perfetto"),
        NPROC,
        CommandOption("check", "", "find who assigns, writes in place, and reads the device"),
        CommandOption("profile", "", "record the operations of ten batches; trace and table"),
        *OPTIONS,
    ),
)


def run(argv: Sequence[str]) -> int:
    """Runs the command."""
    arguments = read_arguments(argv, COMMAND)
    if "help" in arguments.given:
        write_text(job_help(arguments, COMMAND))
        return 0
    if NPROC.name in arguments.given:
        return launch(COMMAND.name, argv, arguments.given[NPROC.name])
    output_path(arguments, "export")
    output_path(arguments, "result", ".json")
    modes = Modes.read(arguments)
    trace_file = output_path(arguments, "trace", ".json")
    given = arguments.given
    diagnostics = Diagnostics(trace_file, "check" in given, "profile" in given)
    job = prepare(arguments, COMMAND)
    if "unlocked" not in arguments.given:
        require_lock(job.configuration)
    task = job.build_task()
    if "print_config" in arguments.given:
        write_text("\n".join(config_lines(job, task_settings(task))))
        return 0
    with modes:
        _train(arguments, job, task, modes, diagnostics)
    return diagnostics.status


def _train(
    arguments: Arguments, job: Job, task: object, modes: Modes, diagnostics: Diagnostics
) -> None:
    """Trains, between a header and a line with the result."""
    configuration = modes.configured(job.configuration)
    _require_duration(configuration, task)
    result_file = ResultFile(arguments.path("result"))
    with (
        diagnostics,
        crash_report() as active,
        TrainerBuilder(
            configuration,
            observers=[*modes.observers, *diagnostics.observers],
            allowed=allowed(arguments),
            origin=job.origin(),
            candidates=job.candidates,
        ).build(
            task,
            algorithms=modes.algorithms,
            callbacks=[*diagnostics.callbacks, *result_file.callbacks],
        ) as trainer,
    ):
        active += trainer.plugins
        write_lines(header_lines(trainer, arguments.task, job.task_options()))
        write_lines(modes.lines())
        state = trainer.state
        state.manifest = {**state.manifest, "unlocked": "unlocked" in arguments.given}
        # In Python what is tried out leaves nothing behind; a command has a folder in any case.
        if state.rank == 0 and state.settings.run_dir is None:
            write_manifest(state.manifest, state.run_dir)
        result = modes.fit(trainer)
        export = arguments.path("export")
        if export is not None and not modes.is_dry:
            trainer.export(export)
        result_file.write(trainer, result)
        stopped = [] if state.stop_reason is None else [f"stopped: {state.stop_reason}"]
        write_lines([*stopped, _result(state.clock, result.metrics)])


def _require_duration(configuration: Configuration, task: object) -> None:
    """Checks that the run has an end, before anything is built and the header is written.

    Raises:
        SettingError: max_duration is not set.
    """
    if configuration.settings(task_settings(task)).max_duration is None:
        raise SettingError(
            "max_duration is not set",
            fix="give `--max-duration 10ep`, or Task(settings={'max_duration': '10ep'})",
        )


def _result(clock: Clock, metrics: Mapping[str, Mapping[str, Any]]) -> str:
    """Sums up a run: `10 epochs, 230 batches in 9.1 s; test/accuracy 0.987`."""
    done = f"{counted(clock.epoch, 'epoch')}, {counted(clock.batch, 'batch', 'batches')}"
    numbers = [
        f"{dataset}/{name} {float(value):.4g}"
        for dataset, values in metrics.items()
        for name, value in values.items()
        if not isinstance(value, Tensor) or value.numel() == 1
    ]
    line = f"{done} in {clock.seconds:.1f} s"
    return f"{line}; {', '.join(numbers)}" if numbers else line
