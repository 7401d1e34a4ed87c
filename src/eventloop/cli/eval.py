"""`eventloop eval`: evaluates a task."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import Tensor

from eventloop.cli.arguments import CHANGES, Arguments, Command, CommandOption
from eventloop.cli.launch import NPROC, launch
from eventloop.cli.model_weights import NOT_STRICT, WEIGHTS, open_trainer, require_eval_data
from eventloop.cli.named_checkpoints import BEST_OPTION
from eventloop.cli.printing import stdout_to_stderr, write_json, write_table
from eventloop.trainer import Trainer

COMMAND = Command(
    "eval",
    "Evaluates a task on its eval data, and writes the metrics.",
    (
        WEIGHTS,
        BEST_OPTION,
        NOT_STRICT,
        *CHANGES,
        NPROC,
        CommandOption("json", "", "write JSON instead of a header and a table"),
    ),
)


def run(arguments: Arguments) -> int:
    """Runs the command."""
    if NPROC.name in arguments.given:
        return launch(COMMAND.name, arguments.argv, arguments.count(NPROC.name))
    # A program parses the metrics on stdout, so plugins' output must not be mixed with them.
    with stdout_to_stderr() if "json" in arguments.given else nullcontext():
        metrics = _metrics(arguments)
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


def _metrics(arguments: Arguments) -> dict[str, dict[str, Any]]:
    """Evaluates the task and returns the metrics by data loader and name."""
    with open_trainer(arguments, COMMAND, _require_data) as trainer:
        return {
            dataset: {
                name: value.tolist() if isinstance(value, Tensor) else value
                for name, value in values.items()
            }
            for dataset, values in trainer.eval().items()
        }


def _require_data(trainer: Trainer, arguments: Arguments) -> None:
    if not trainer.evaluates:
        require_eval_data(trainer, arguments)
