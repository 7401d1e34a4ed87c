"""The everyday modes of `eventloop fit`: how much is trained, and whether it counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING, Self

from eventloop.cli.arguments import Arguments, CommandOption
from eventloop.config.layers import Layer
from eventloop.config.options import Value, flag
from eventloop.errors import UsageError
from eventloop.modes import LimitBatches, Overfit, Sooner, dry_limit, dry_settings, rehearse
from eventloop.plugin.records import FlagPlugin

if TYPE_CHECKING:
    from eventloop.config.configuration import Configuration
    from eventloop.plugin.observe import Observer
    from eventloop.trainer import Result, Trainer

OPTIONS = (
    CommandOption("dry-run", "", "two epochs of two batches of everything, keeping nothing"),
    CommandOption("overfit-batches", "N", "train and evaluate on the same first N batches"),
    CommandOption("limit-train-batches", "N", "end each epoch after N batches"),
    CommandOption("limit-eval-batches", "N", "end each evaluation set after N batches"),
    CommandOption("sanity-eval", "N", "evaluate N batches before the first step, for nothing"),
)
_LIMITS = ("limit_train_batches", "limit_eval_batches")
# Each says which batches there are, so that two of them contradict each other.
_CONTRADICTIONS = (
    ("dry_run", "overfit_batches"),
    ("dry_run", "limit_train_batches"),
    ("dry_run", "limit_eval_batches"),
    ("dry_run", "profile"),
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()


def _count(arguments: Arguments, name: str) -> int:
    text = arguments.given[name.replace("-", "_")]
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UsageError(
            f"{flag(name)} takes a number of batches, 1 or more, not {text!r}",
            fix=f"write `{flag(name)} 2`, say",
        )
    return int(text)
