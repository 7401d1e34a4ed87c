"""`eventloop eval`: evaluates a task."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from eventloop.cli.arguments import CHANGES, Arguments, Command, CommandOption
from eventloop.cli.job import prepare
from eventloop.cli.launch import NPROC, launch
from eventloop.cli.model_weights import (
    NOT_STRICT,
    WEIGHTS,
    load_weights,
    open_trainer,
    require_eval_data,
    weights_path,
    write_header,
)
from eventloop.cli.named_checkpoints import BEST
from eventloop.cli.output import stdout_to_stderr, write_json, write_table

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
    with open_trainer(arguments, job) as trainer:
        if not trainer.evaluates:
            require_eval_data(trainer, arguments.task)
        load_weights(trainer, arguments, weights)
        if "json" not in arguments.given:
            write_header(trainer, arguments, job)
        return {
            dataset: {
                name: value.tolist() if isinstance(value, Tensor) else value
                for name, value in values.items()
            }
            for dataset, values in trainer.eval().items()
        }
