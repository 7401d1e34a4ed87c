"""`eventloop eval`: evaluate a task."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from eventloop.cli.arguments import (
    CHANGES,
    Arguments,
    Command,
    CommandOption,
    allowed,
)
from eventloop.cli.job import (
    BEST,
    NOT_STRICT,
    WEIGHTS,
    header_lines,
    prepare,
    weights_line,
    weights_path,
)
from eventloop.cli.launch import OPTION as NPROC
from eventloop.cli.launch import launch
from eventloop.cli.output import (
    crash_report,
    stdout_to_stderr,
    write_json,
    write_lines,
    write_table,
)
from eventloop.errors import TaskError
from eventloop.trainer import Trainer, TrainerBuilder

COMMAND = Command(
    "eval",
    "Evaluates a task on its eval data, and writes the metrics.",
    (
        WEIGHTS,
        BEST,
        NOT_STRICT,
        *CHANGES,
        NPROC,
        CommandOption("json", "", "write JSON instead of a header and a table"),
    ),
)


def run(arguments: Arguments) -> int:
    """Runs the command."""
    if NPROC.name in arguments.given:
        return launch(COMMAND.name, arguments.argv, arguments.given[NPROC.name])
    # A program that reads the metrics mustn't find what plugins print among them.
    with stdout_to_stderr() if "json" in arguments.given else nullcontext():
        with weights_path(arguments) as weights:
            metrics = _metrics(arguments, weights)
    if "json" in arguments.given:
        write_json(metrics)
    else:
        write_table(
            ("eval set", "metric", "value"),
            [
                (dataset, name, f"{value:.6g}" if isinstance(value, float) else str(value))
                for dataset, values in metrics.items()
                for name, value in values.items()
            ],
        )
    return 0


def _metrics(arguments: Arguments, weights: Path | None) -> dict[str, dict[str, Any]]:
    """Evaluates the task and returns the metrics by data loader and name."""
    job = prepare(arguments, COMMAND)
    with (
        crash_report() as active,
        TrainerBuilder(
            job.configuration, allowed=allowed(arguments), candidates=job.candidates
        ).build(job.build_task()) as trainer,
    ):
        active += trainer.plugins
        if not trainer.evaluates:
            require_eval_data(trainer, arguments.task)
        if weights is not None:
            strict = "not_strict" not in arguments.given
            trainer.load_weights(weights, strict=strict, as_evaluated=strict)
        if "json" not in arguments.given:
            write_lines(header_lines(trainer, arguments.task, job.task_options()))
            write_lines([weights_line(trainer, arguments)])
        return {
            dataset: {name: _plain(value) for name, value in values.items()}
            for dataset, values in trainer.eval().items()
        }


def require_eval_data(trainer: Trainer, task: str) -> None:
    """Checks that there is something to evaluate or predict.

    Raises:
        TaskError: the task has no eval data.
    """
    if not trainer.state.eval_dataloaders:
        raise TaskError(
            f"{task} has no eval data",
            fix="give `Task(eval_dataloaders={'test': loader})`",
        )


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value
