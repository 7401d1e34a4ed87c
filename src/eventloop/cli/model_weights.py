"""Shared by `fit`, `eval` and `predict`: finds the weights, and loads them into a trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from eventloop.cli.arguments import Arguments, Command, CommandOption, allowed
from eventloop.cli.failure_report import crash_report
from eventloop.cli.header import header_lines
from eventloop.cli.job import prepare
from eventloop.cli.named_checkpoints import BEST_OPTION, one_checkpoint
from eventloop.cli.output_files import SUFFIX
from eventloop.cli.printing import write_lines
from eventloop.errors import TaskError, UsageError, closest_at
from eventloop.run.open import Request
from eventloop.trainer import Trainer
from eventloop.urls import Url, place_of

WEIGHTS = CommandOption(
    "weights",
    "PATH",
    "load these weights: a safetensors file; a checkpoint or its URL, or a run's newest, with the averages "
    "that active plugins saved there; by default as the task builds them",
)
NOT_STRICT = CommandOption(
    "not-strict", "", "load the matching names of --weights, and leave the other weights as built"
)


@contextmanager
def weights_path(arguments: Arguments) -> Iterator[Path | None]:
    """Yields the file or folder to load `--weights` from; for a URL, a local copy.

    Raises:
        UsageError: the path doesn't exist, or `--not-strict` or `--best` is used without weights.
    """
    word = arguments.given.get("weights", "")
    is_best = BEST_OPTION.name in arguments.given
    if is_best and not word:
        raise UsageError("--best has no effect without --weights", fix="add `--weights RUN`")
    if is_best or isinstance(place_of(word), Url):
        with one_checkpoint(word, best=is_best) as (copy, _):
            yield copy
    else:
        yield _local_weights(arguments)


@contextmanager
def open_trainer(
    arguments: Arguments, command: Command, require_data: Callable[[Trainer, Arguments], object]
) -> Iterator[Trainer]:
    """Yields a trainer with the requested weights; writes the header, unless the output is JSON.

    A failure is reported with the active plugins.

    Args:
        arguments: the parsed command line.
        command: the command.
        require_data: called before weights are loaded; raises if there is no data to evaluate.
    """
    with (
        weights_path(arguments) as weights,
        TemporaryDirectory(prefix=f"eventloop-{command.name}-") as folder,
        crash_report() as active,
    ):
        job = prepare(arguments, command)
        request = Request(
            job.build_task(),
            job.configuration,
            allowed=allowed(arguments),
            discovery=job.discovery,
            scratch=Path(folder),
        )
        with Trainer.of_request(request) as trainer:
            active += trainer.plugins
            require_data(trainer, arguments)
            if weights is not None:
                strict = "not_strict" not in arguments.given
                trainer.load_weights(weights, strict=strict, as_evaluated=strict)
            if "json" not in arguments.given:
                keeps_files = trainer.state.settings.run_dir is not None
                header = header_lines(
                    trainer, arguments.task, job.task_options(), keeps_files=keeps_files
                )
                write_lines([*header, weights_line(trainer, arguments)])
            yield trainer


def require_eval_data(trainer: Trainer, arguments: Arguments) -> None:
    """Checks that the task has eval data; raises TaskError if not."""
    if not trainer.state.eval_dataloaders:
        raise TaskError(
            f"{arguments.task} has no eval data",
            fix="set `Task(eval_dataloaders={'test': loader})`",
        )


def _local_weights(arguments: Arguments) -> Path | None:
    path = arguments.path("weights")
    if path is None and NOT_STRICT.name.replace("-", "_") in arguments.given:
        raise UsageError(
            "--not-strict has no effect without --weights",
            fix=f"add `--weights model{SUFFIX}`, or leave --not-strict out",
        )
    if path is not None and not path.exists():
        raise UsageError(
            f"--weights: there is no file {str(path)!r}{closest_at(path)}",
            fix=f"`eventloop fit TASK --export model{SUFFIX}` writes one",
        )
    return path


def weights_line(trainer: Trainer, arguments: Arguments) -> str:
    """Returns the header's line about the weights."""
    if "weights" in arguments.given:
        best = ", the best of its checkpoints" if BEST_OPTION.name in arguments.given else ""
        return f"weights: {arguments.given['weights']}{best}"
    if trainer.state.clock.batch:
        return "weights: those of the resumed run"
    return "weights: as the task builds them, not trained here; `--weights PATH` loads others"
