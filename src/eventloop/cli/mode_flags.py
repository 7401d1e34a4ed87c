"""The modes of `eventloop fit`: how much is trained, whether it counts, and what looks on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Self

from eventloop.cli.arguments import Arguments, CommandOption
from eventloop.cli.launch import OPTION as NPROC
from eventloop.cli.output import write_lines, write_table
from eventloop.config.layers import Layer
from eventloop.config.options import Value, flag
from eventloop.diagnostics.check import Check
from eventloop.errors import UsageError, counted
from eventloop.modes import LimitBatches, Overfit, Sooner, dry_limit, dry_settings, rehearse
from eventloop.plugin.records import FlagPlugin

if TYPE_CHECKING:
    from eventloop.config.configuration import Configuration
    from eventloop.plugin.observe import Observer
    from eventloop.run.result import Result
    from eventloop.trainer import Trainer

OPTIONS = (
    CommandOption("dry-run", "", "two epochs of two batches of everything, keeping nothing"),
    CommandOption("overfit-batches", "N", "train and evaluate on the same first N batches"),
    CommandOption("limit-train-batches", "N", "end each epoch after N batches"),
    CommandOption("limit-eval-batches", "N", "end each evaluation set after N batches"),
    CommandOption("sanity-eval", "N", "evaluate N batches before the first step, for nothing"),
)
# What a command that makes runs hands on to them: the options that change what is trained.
FIT_OPTIONS = (NPROC, *(one for one in OPTIONS if one.name.startswith("limit-")))
_LIMITS = ("limit_train_batches", "limit_eval_batches")
# Each says which batches there are, so that two of them contradict each other.
_CONTRADICTIONS = (
    ("dry_run", "overfit_batches"),
    ("dry_run", "limit_train_batches"),
    ("dry_run", "limit_eval_batches"),
    ("overfit_batches", "limit_train_batches"),
    ("overfit_batches", "limit_eval_batches"),
)


@dataclass
class Modes:
    """The modes of one run; inside its context a dry run has a folder, which is removed then.

    Args:
        is_dry: whether nothing is kept.
        counts: the numbers of batches that were given, by folded option.
    """

    is_dry: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    _folder: str = ""
    _stack: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def read(cls, arguments: Arguments) -> Self:
        """Reads the modes of a command line.

        Raises:
            UsageError: a value is not a number of batches, or two modes contradict each other.
        """
        for one, other in _CONTRADICTIONS:
            if one in arguments.given and other in arguments.given:
                raise UsageError(
                    f"{flag(one)} and {flag(other)} contradict each other",
                    fix=f"leave one of them out, `{flag(other)}` say",
                )
        counts = {
            option.name.replace("-", "_"): _count(arguments, option.name)
            for option in OPTIONS
            if option.metavar and option.name.replace("-", "_") in arguments.given
        }
        return cls("dry_run" in arguments.given, counts)

    @property
    def algorithms(self) -> list[object]:
        """What the trainer is given to limit the batches."""
        if self.is_dry:
            return [FlagPlugin(dry_limit(), "--dry-run")]
        if (batches := self.counts.get("overfit_batches")) is not None:
            return [FlagPlugin(Overfit(batches=batches), "--overfit-batches")]
        limits = [name for name in _LIMITS if name in self.counts]
        if not limits:
            return []
        train, evaluation = map(self.counts.get, _LIMITS)
        limit = LimitBatches(train_batches=train, eval_batches=evaluation)
        return [FlagPlugin(limit, " ".join(map(flag, limits)))]

    @property
    def observers(self) -> list[Observer]:
        """What the trainer puts around the hooks."""
        return [Sooner()] if self.is_dry else []

    def configured(self, configuration: Configuration) -> Configuration:
        """Returns the configuration with what a mode says of the settings, which wins."""
        if not self.is_dry:
            return configuration
        values = {**dry_settings(), "run_dir": self._folder}
        layer = Layer("flag", {name: Value(value, "--dry-run") for name, value in values.items()})
        return replace(configuration, layers=(layer, *configuration.layers))

    def lines(self) -> Iterator[str]:
        """Yields what the header says of the modes."""
        if self.is_dry:
            yield "dry run: two epochs of two batches; the run dir is removed at the end"
        if (batches := self.counts.get("overfit_batches")) is not None:
            yield f"overfit: trains and evaluates on the same batches, {batches} of them"

    def fit(self, trainer: Trainer) -> Result:
        """Trains as the modes say.

        Raises:
            UsageError: a mode is about eval data, and there is none.
        """
        for name in ("sanity_eval", "limit_eval_batches"):
            if name in self.counts and not trainer.state.eval_dataloaders:
                raise UsageError(
                    f"{flag(name)} has no effect: the task has no eval data",
                    fix=f"leave {flag(name)} out, or give Task(eval_dataloaders=...)",
                )
        if (num_batches := self.counts.get("sanity_eval")) is not None:
            trainer.sanity_eval(num_batches)
        return rehearse(trainer) if self.is_dry else trainer.fit()

    def __enter__(self) -> Self:
        if self.is_dry:
            folder = TemporaryDirectory(prefix="eventloop-dry-run-")
            self._folder = self._stack.enter_context(folder)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _count(arguments: Arguments, name: str) -> int:
    text = arguments.given[name.replace("-", "_")]
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UsageError(
            f"{flag(name)} takes a number of batches, 1 or more, not {text!r}",
            fix=f"write `{flag(name)} 2`, say",
        )
    return int(text)


class Diagnostics:
    """The observers of a run; they report when it ends, however it ends.

    Args:
        check: whether to check.
    """

    def __init__(self, check: bool) -> None:
        self._check = Check() if check else None

    @property
    def observers(self) -> list[Observer]:
        """What the trainer puts around the hooks."""
        return [] if self._check is None else [self._check]

    @property
    def status(self) -> int:
        """The exit status: 1 where the check found something, else 0."""
        return int(self._check is not None and bool(self._check.findings))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._check is not None:
            rows = list(self._check.rows())
            if rows:
                write_table(Check.columns, rows)
            found = self._check.findings
            write_lines([f"check: {counted(len(found), 'problem') if found else 'no problem'}"])
            write_lines([line for one in found for line in str(one).splitlines()])
