"""`eventloop fit`: trains a task, prints its configuration, writes the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.checkpoint.locations import FOLDER
from eventloop.checkpoint.saver import interval_of
from eventloop.checkpoint.store import Store
from eventloop.cli.arguments import CHANGES, Arguments, Command, CommandOption, allowed
from eventloop.cli.failure_report import crash_report
from eventloop.cli.fit_options import OPTIONS, Modes
from eventloop.cli.header import header_lines
from eventloop.cli.job import Job, prepare
from eventloop.cli.launch import NPROC, launch
from eventloop.cli.model_weights import NOT_STRICT, weights_line, weights_path
from eventloop.cli.named_checkpoints import BEST_OPTION
from eventloop.cli.output_files import SUFFIX, output_path
from eventloop.cli.print_config import config_lines
from eventloop.cli.printing import stdout_to_stderr, write_lines, write_text
from eventloop.errors import SettingError, UsageError, counted
from eventloop.fixes import pip, shell
from eventloop.hook_markers import hookimpl
from eventloop.naming import fold
from eventloop.plugin.lock_digests import lock_path
from eventloop.run.open import Request, task_defaults_of
from eventloop.run.run_manifest import write_manifest
from eventloop.trainer import Trainer
from eventloop.training.metrics import scalars_of
from eventloop.training.progress_lines import ProgressLines

if TYPE_CHECKING:
    from eventloop.clock import Clock
    from eventloop.plugin.registry import Registry

COMMAND = Command(
    "fit",
    "Trains a task; installed plugins take part.",
    (
        CommandOption("print-config", "", "write all values with their sources, and stop"),
        CommandOption(
            "export",
            "FILE.safetensors",
            "write the trained weights; a plugin may support other formats, or a folder, FOLDER/",
        ),
        CommandOption(
            "export-best",
            "",
            "with --export: write the weights of the best evaluation, not the last",
        ),
        CommandOption(
            "weights",
            "PATH",
            "start a new run from these weights: a safetensors file; a checkpoint or its URL; or a run",
        ),
        BEST_OPTION,
        NOT_STRICT,
        CommandOption("result", "FILE.json", "write metrics, time per step and memory at the end"),
        CommandOption("unlocked", "", "ignore eventloop.lock, if there is one"),
        *CHANGES,
        NPROC,
        CommandOption(
            "check", "", "report plugins that assign state, write in place, or wait for the device"
        ),
        *OPTIONS,
    ),
)


def run(arguments: Arguments) -> int:
    """Runs the command."""
    if NPROC.name in arguments.given:
        return launch(COMMAND.name, arguments.argv, arguments.count(NPROC.name))
    export = arguments.path("export")
    if not arguments.given.get("export", "").endswith("/"):  # a plugin checks and writes a folder
        output_path(arguments, "export", (export and export.suffix) or SUFFIX)
    if _EXPORT_BEST in arguments.given and export is None:
        raise UsageError(
            "--export-best says which weights --export writes, but --export isn't given",
            fix=f"add `--export model{SUFFIX}`, or leave --export-best out",
        )
    output_path(arguments, "result", ".json")
    modes = Modes.read(arguments)
    is_printed = "print_config" in arguments.given
    # stdout may be redirected to a configuration file, so output of task and plugins goes to stderr.
    with stdout_to_stderr() if is_printed else nullcontext():
        no_training = modes.is_dry or modes.checks or is_printed
        job = prepare(arguments, COMMAND, trains=not no_training)
        check_lock = None if is_printed else _lock_check(arguments, job)
        task = job.build_task()
    if is_printed:
        write_text("\n".join(config_lines(job, task_defaults_of(task).settings)))
        return 0
    with modes:
        _train(arguments, job, task, modes, check_lock)
    return modes.status


def _lock_check(arguments: Arguments, job: Job) -> Callable[[Registry], None] | None:
    """Returns a function that compares a run's plugins with the project's lock; None without a lock."""
    lock = lock_path(Path.cwd())
    if "unlocked" in arguments.given or not lock.is_file():
        return None
    from eventloop.plugin.lock_file import (
        check_lock,  # with tomlkit, which other runs needn't import
    )

    plugins = job.discovery.chosen(job.configuration)
    chosen = [plugin.name for plugin in plugins if plugin.stage == "chosen"]
    return lambda registry: check_lock(lock, registry, chosen)


def _train(
    arguments: Arguments,
    job: Job,
    task: object,
    modes: Modes,
    check_lock: Callable[[Registry], None] | None,
) -> None:
    """Trains, and prints a header and a line with the result."""
    configuration = modes.configured(job.configuration)
    settings = configuration.settings(task_defaults_of(task).settings)
    if settings.max_duration is None:  # raised before anything is built or printed
        raise SettingError(
            "max_duration is not set",
            fix="set `--max-duration 10ep`, or Task(settings={'max_duration': '10ep'})",
        )
    is_best = _EXPORT_BEST in arguments.given
    if is_best and settings.checkpoint_best is None:
        raise SettingError(
            "--export-best, but no metric says which evaluation is the best",
            fix="set `--checkpoint-best NAME`, such as valid/accuracy or 'min valid/loss'",
        )
    lines = ProgressLines(write=lambda line: write_lines([line]))
    with (
        weights_path(arguments) as weights,
        crash_report() as active,
        Trainer.of_request(
            Request(
                task,
                configuration,
                modes.algorithms,
                modes.callbacks,
                observers=modes.observers,
                allowed=allowed(arguments),
                origin=job.origin(),
                discovery=job.discovery,
                core=[lines] if settings.compile is False else [lines, Compiling()],
                check_plugins=check_lock,
            )
        ) as trainer,
    ):
        active += trainer.plugins
        export = arguments.path("export")
        writers = trainer.assembly.implementations["export"]  # a plugin's may be of another format
        is_cores = all(impl.plugin.role == "core" or impl.wrapper for impl in writers)
        if export is not None and is_cores:
            output_path(arguments, "export")
        write_lines(header_lines(trainer, arguments.task, job.task_options()))
        if weights is not None:
            write_lines([_start_from(trainer, arguments, weights)])
        write_lines([*trainer.first_runs(Path.cwd()), *modes.lines()])
        has_progress_package = any(plugin.distribution == _PACKAGE for plugin in trainer.off)
        if not has_progress_package and any(
            impl.target is lines for impl in trainer.assembly.plugins
        ):
            write_lines([_PLAIN])
        state = trainer.state
        state.manifest = {**state.manifest, "unlocked": "unlocked" in arguments.given}
        # Python code that tries things out shouldn't create folders, but a command always has one.
        if state.rank == 0 and state.settings.run_dir is None:
            write_manifest(state.manifest, state.run_dir)
        result = modes.fit(trainer)
        exported = []
        if export is not None and not modes.is_dry:
            trainer.export(export, best=is_best)
            exported = [_exported(trainer, export, is_best=is_best)]
        is_early = result.stopped is not None and not result.stopped.is_planned
        stopped = [result.stopped.cause] if result.stopped is not None and is_early else []
        is_used = export is not None or modes.algorithms or interval_of(state.settings) is not None
        hint = [] if is_used or Store(state.run_dir / FOLDER).paths() else [_NONE_SAVED]
        best = result.tested_with
        tested = [] if best is None else [f"test sets: with the weights of {best.name}, the best"]
        write_lines([*stopped, _result(state.clock, result.metrics), *tested, *hint, *exported])


class Compiling:
    """Announces that the first step compiles, which takes long without printing anything."""

    def __init__(self) -> None:
        self._has_announced = False

    @hookimpl(rank_zero=True)
    def before_train_batch(self) -> None:
        if not self._has_announced:
            self._has_announced = True
            write_lines(["compiling: the first step waits for it, often for a minute"])


def _start_from(trainer: Trainer, arguments: Arguments, weights: Path) -> str:
    """Loads the weights that a new run starts from; returns the header's line about them.

    The same command line also resumes the run; then the run's own weights are used.
    """
    if trainer.state.clock.batch:
        return f"weights: those of the resumed run, not {arguments.given['weights']}"
    trainer.load_weights(weights, strict="not_strict" not in arguments.given)
    return weights_line(trainer, arguments)


def _exported(trainer: Trainer, path: Path, *, is_best: bool) -> str:
    """Returns the line that describes the exported weights."""
    if is_best:
        metric = trainer.state.settings.checkpoint_best
        return f"exported: {path}, the weights of the best evaluation by {metric}"
    plugin_names = [
        plugin.name
        for plugin in trainer.plugins
        if plugin.role != "task" and fold(plugin.name) in trainer.assembly.exporting
    ]
    weights_text = (
        f"the weights of {' and '.join(plugin_names)}"
        if plugin_names
        else "the weights of the last step"
    )
    if trainer.state.settings.checkpoint_best is None or path.suffix != SUFFIX:
        return f"exported: {path}, {weights_text}"
    place = trainer.state.settings.run_dir or trainer.state.run_dir
    command_for_best = shell(
        "eventloop", "export", str(place), str(path.with_stem("best")), "--best"
    )
    return f"exported: {path}, {weights_text}; {command_for_best} writes the best, and so does --export-best"


_EXPORT_BEST = "export_best"
_PACKAGE = "eventloop-progress"
_PLAIN = f"progress: a line per epoch or evaluation; {pip('install', _PACKAGE)} for a bar"
_NONE_SAVED = (
    "no weights were kept: `--run-dir FOLDER` keeps checkpoints, and `--export FILE.safetensors` "
    "writes the weights at the end"
)


def _result(clock: Clock, metrics: Mapping[str, Mapping[str, Any]]) -> str:
    """Summarises a run: `10 epochs, 230 batches in 9.1 s; test/accuracy 0.987`."""
    done = f"{counted(clock.epoch, 'epoch')}, {counted(clock.batch, 'batch', 'batches')}"
    line = f"{done} in {clock.seconds:.1f} s"
    numbers = [f"{name} {value:.4g}" for name, value in scalars_of(metrics).items()]
    return f"{line}; {', '.join(numbers)}" if numbers else line
