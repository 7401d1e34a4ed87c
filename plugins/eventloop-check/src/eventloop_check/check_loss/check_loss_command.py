"""`eventloop check-loss`: whether a loss is the same in parts, padded, on ranks and in another order."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch

from eventloop import TaskError
from eventloop.commands import (
    FAILURE,
    Arguments,
    Command,
    CommandOption,
    UsageError,
    closest,
    flag,
    prepare,
    read_arguments,
    run_command,
    stdout_to_stderr,
    write_json,
)
from eventloop_check.check_loss.laws import LAWS, Variant
from eventloop_check.check_loss.loss_check import Measured, Report, check
from eventloop_check.check_loss.measurement import Measurement
from eventloop_check.check_loss.report import content_of, write_report
from eventloop_experiments.runs import RunProcesses, RunsFolder, fit_argv, refuse_own, share_cores

if TYPE_CHECKING:
    from eventloop.commands import Job

DECLARATION = "LOSS_LAWS_NOT_KEPT"
_PROBE = "eventloop_check.check_loss.probe"
COMMAND = Command(
    "check-loss",
    "Compares loss and gradients of one batch in one piece with those in microbatches, with other "
    "padding, on two ranks and in another order, without training. The task is checked alone: "
    "plugins take part if they are named with -p. No run of yours is touched. The exit status is 1 "
    "if a law is broken that isn't declared.",
    (
        CommandOption(
            "not", "LAWS", f"laws that the task needn't keep: {', '.join(LAWS)}; or {DECLARATION} "
            "in the task's file"
        ),
        CommandOption("samples", "N", "samples of the batch, at most; 16 unless given"),
        CommandOption("json", "", "write JSON instead of text"),
    ),
)  # fmt: skip
# Settings that the command sets for each run.
_SETTINGS = {
    "max_duration": "1ba",
    "eval_interval": "none",
    "eval_at_start": "false",
    "checkpoint_interval": "none",
    "checkpoint_best": "none",
    "on_bad_loss": "ignore",
    "compile": "false",
}
_OWN = (*_SETTINGS, "microbatch_size", "run_dir", "resume", "autoload")


@dataclass(frozen=True)
class _Run:
    """The run of a variant in a folder of runs."""

    variant: Variant
    argv: Sequence[str] = field(hash=False)

    @property
    def place(self) -> Path:
        return Path(self.variant.name)

    def __str__(self) -> str:
        return self.variant.title


def run(argv: Sequence[str]) -> int:
    """Runs the command."""
    return run_command(COMMAND, _run, argv)


def _run(arguments: Arguments) -> int:
    refuse_own(arguments, _OWN)
    if "no_plugins" not in arguments.given:
        arguments = read_arguments([*arguments.argv, "--no-plugins"], COMMAND)
    as_json = "json" in arguments.given
    with stdout_to_stderr() if as_json else nullcontext():
        job = prepare(arguments, COMMAND)
        report = _checked(arguments, job, declared_laws(arguments, job))
    if as_json:
        write_json(content_of(arguments.task, report))
    else:
        write_report(report)
    return 0 if report.succeeds else FAILURE


def declared_laws(arguments: Arguments, job: Job) -> dict[str, str]:
    """Returns the laws that the task needn't keep, with reasons: from its file and from `--not`.

    Raises:
        TaskError: the file declares something else.
        UsageError: there is no such law.
    """
    label = arguments.task
    path = Path(label).absolute()
    modules = [*sys.modules.items()]
    module = None
    for name, candidate in modules:
        is_file = path.suffix == ".py" and getattr(candidate, "__file__", "") == str(path)
        if name == label or is_file:
            module = candidate
            break
    declared = getattr(module, DECLARATION, {})
    is_mapping = isinstance(declared, Mapping)
    if not is_mapping or not all(
        isinstance(text, str) for pair in declared.items() for text in pair
    ):
        raise TaskError(
            f"{DECLARATION} in {label} is {declared!r}, not reasons by law",
            fix=f'write {DECLARATION} = {{"microbatches": "batch norms"}}',
        )
    laws = dict(declared)
    for text in arguments.given.get("not", "").split(","):
        if text.strip():
            laws.setdefault(text.strip(), "--not")
    for law in laws:
        if law not in LAWS:
            raise UsageError(
                f"no law is named {law!r}{closest(law, LAWS)}",
                fix=f"they are {', '.join(LAWS)}",
            )
    return laws


def _checked(arguments: Arguments, job: Job, declared: Mapping[str, str]) -> Report:
    """Makes the runs in a temporary folder.

    Raises:
        EventloopError: training on the batch in a single piece fails.
        KeyboardInterrupt, Terminated: a signal was received.
    """
    samples = arguments.count("samples", 16)
    jobs, threads = share_cores(job, arguments)
    with TemporaryDirectory(prefix="eventloop-check-loss-") as name:
        folder = Path(name)
        runs_folder = RunsFolder(folder / "runs", "check")
        processes = RunProcesses[_Run](runs_folder, jobs=jobs, threads=threads, modules=[_PROBE])

        def measure(variants: Sequence[Variant]) -> Measured:
            runs = [
                _Run(variant, _argv(arguments, variant, folder, samples)) for variant in variants
            ]
            with _shown(runs):
                outcomes = {
                    outcome.run.variant.name: outcome for outcome in processes.outcomes(runs)
                }
            if len(outcomes) < len(runs):
                raise processes.stopped("nothing is reported")
            return {
                name: _measured(folder / f"{name}.json") or outcome.reason
                for name, outcome in outcomes.items()
            }

        with processes:
            return check(measure, declared)


def _shown(runs: Sequence[_Run]) -> AbstractContextManager[object]:
    """Shows the runs' titles on a terminal while they are computed."""
    if not sys.stderr.isatty() or not runs:
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(", ".join(map(str, runs)))


def _measured(file: Path) -> Measurement | None:
    """Reads the measurement of a run; None if the run failed before it was written."""
    if not file.exists():
        return None
    return Measurement.from_json(json.loads(file.read_text(encoding="ascii")))


def _argv(arguments: Arguments, variant: Variant, folder: Path, samples: int) -> list[str]:
    """Returns the command line of a variant's run."""
    options = {**_SETTINGS, "microbatch_size": str(variant.microbatch_size or "none").lower()}
    options |= {
        "check_loss.variant": variant.name,
        "check_loss.folder": str(folder),
        "check_loss.samples": str(samples),
    }
    if "precision" not in arguments.flags:
        options["precision"] = "fp32"  # half precision would hide small factors in rounding
    if (
        variant.num_ranks > 1
        and "device" not in arguments.flags
        and torch.accelerator.device_count() < 2
    ):
        options["device"] = "cpu"  # two ranks can't share a GPU
    return [
        *fit_argv(arguments),
        f"-p{_PROBE}:CheckLoss",
        *([f"--nproc={variant.num_ranks}"] if variant.num_ranks > 1 else []),
        *(f"{flag(name)}={value}" for name, value in options.items()),
    ]
