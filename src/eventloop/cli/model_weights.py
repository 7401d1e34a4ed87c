"""Shared by `eval` and `predict`: finds the weights, and loads them into a trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eventloop.cli.arguments import Arguments, CommandOption, allowed
from eventloop.cli.header import header_lines
from eventloop.cli.job import Job
from eventloop.cli.named_checkpoints import BEST, one_checkpoint
from eventloop.cli.output import SUFFIX, crash_report, write_lines
from eventloop.errors import TaskError, UsageError, closest
from eventloop.run.open import Request
from eventloop.trainer import Trainer
from eventloop.urls import Url, place_of

WEIGHTS = CommandOption(
    "weights",
    "PATH",
    "load these: a safetensors file; a checkpoint or its URL, or a run's newest, with the averages that active "
    "plugins kept there; else as the task builds them",
)
NOT_STRICT = CommandOption(
    "not-strict", "", "load the matching names of --weights, and leave the rest as built"
)


@contextmanager
def weights_path(arguments: Arguments) -> Iterator[Path | None]:
    """Yields the file or folder to load `--weights` from; for a URL, a local copy.

    Raises:
        UsageError: it doesn't exist, or `--not-strict` or `--best` is used without weights.
    """
    word, is_best = arguments.given.get("weights", ""), BEST.name in arguments.given
    if is_best and not word:
        raise UsageError(
            "--best, but no --weights that it could be said of", fix="add `--weights RUN`"
        )
    if is_best or isinstance(place_of(word), Url):
        with one_checkpoint(word, best=is_best) as (copy, _):
            yield copy
    else:
        yield _local_weights(arguments)


@contextmanager
def open_trainer(arguments: Arguments, job: Job) -> Iterator[Trainer]:
    """Yields the job's trainer; reports a failure with the active plugins."""
    with crash_report() as active:
        request = Request(
            job.build_task(),
            job.configuration,
            allowed=allowed(arguments),
            candidates=job.candidates,
        )
        with Trainer(request) as trainer:
            active += trainer.plugins
            yield trainer


def load_weights(trainer: Trainer, arguments: Arguments, path: Path | None) -> None:
    """Loads `--weights`, if given; all of them, unless `--not-strict` is given."""
    if path is not None:
        strict = "not_strict" not in arguments.given
        trainer.load_weights(path, strict=strict, as_evaluated=strict)


def write_header(trainer: Trainer, arguments: Arguments, job: Job) -> None:
    """Writes the header, including the weights used."""
    write_lines(header_lines(trainer, arguments.task, job.task_options()))
    write_lines([_weights_line(trainer, arguments)])


def require_eval_data(trainer: Trainer, task: str) -> None:
    """Checks that there is eval data.

    Raises:
        TaskError: the task has no eval data.
    """
    if not trainer.state.eval_dataloaders:
        raise TaskError(
            f"{task} has no eval data",
            fix="give `Task(eval_dataloaders={'test': loader})`",
        )


def _local_weights(arguments: Arguments) -> Path | None:
    path = arguments.path("weights")
    if path is None and NOT_STRICT.name.replace("-", "_") in arguments.given:
        raise UsageError(
            "--not-strict, but no --weights that it could be said of",
            fix=f"add `--weights model{SUFFIX}`, or leave --not-strict out",
        )
    if path is not None and not path.exists():
        there = path.parent
        names = [one.name for one in there.iterdir()] if there.is_dir() else []
        raise UsageError(
            f"--weights: there is no file {str(path)!r}{closest(path.name, names)}",
            fix=f"`eventloop fit TASK --export model{SUFFIX}` writes one",
        )
    return path


def _weights_line(trainer: Trainer, arguments: Arguments) -> str:
    """Returns the header's line on the weights used."""
    if "weights" in arguments.given:
        best = ", the best of its checkpoints" if BEST.name in arguments.given else ""
        return f"weights: {arguments.given['weights']}{best}"
    if trainer.state.clock.batch:
        return "weights: those of the resumed run"
    return "weights: as the task builds them, not trained here; `--weights PATH` loads others"
