"""Implements options of `eventloop fit`: limits of batches, dry runs, the check, the result."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self

from eventloop.batch_limits import LimitBatches, Overfit
from eventloop.cli.arguments import Arguments, CommandOption
from eventloop.cli.launch import NPROC
from eventloop.config.option_types import Value, flag
from eventloop.config.value_sources import Layer
from eventloop.dry_run import EveryBatch, dry_limit, dry_settings, rehearse
from eventloop.errors import UsageError
from eventloop.fixes import distribution_of, install
from eventloop.plugin.discover import extensions
from eventloop.plugin.load import imported_callable
from eventloop.plugin.name_problems import extension_problems
from eventloop.plugin.records import Plugin, Role

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
    CommandOption("sanity-eval", "N", "evaluate N batches before the first step, as a check"),
)
# The options that a command passes on to the runs that it starts: these change the training.
FIT_OPTIONS = (NPROC, *(option for option in OPTIONS if option.name.startswith("limit-")))
_LIMITS = ("limit_train_batches", "limit_eval_batches")
# Each option of the first tuple contradicts all of the second, because each selects the batches.
_CONTRADICTIONS = (("dry_run", "overfit_batches"), ("overfit_batches", *_LIMITS))


@dataclass
class Modes:
    """The modes of a run; as a context manager, provides a temporary folder for a dry run.

    Args:
        is_dry: whether the run keeps no files.
        counts: the requested numbers of batches by folded option.
        checks: the observer of `--check`, which reports at the end of the run; empty without it.
        results: the object that measures and writes for `--result`; empty without it.
    """

    is_dry: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    checks: list[Any] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    _folder: str = ""
    _stack: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def read(cls, arguments: Arguments) -> Self:
        """Reads the modes of a command line.

        Raises:
            UsageError: a value isn't a number of batches, two modes can't be combined, or the
                package of an option isn't installed.
            PluginError: the package of an option can't be used.
        """
        for mode, contradicted in itertools.product(*_CONTRADICTIONS):
            if mode == contradicted:
                continue
            if mode in arguments.given and contradicted in arguments.given:
                raise UsageError(
                    f"{flag(mode)} and {flag(contradicted)} contradict each other",
                    fix=f"leave one of them out, such as `{flag(contradicted)}`",
                )
        counts = {
            option.name.replace("-", "_"): arguments.count(option.name)
            for option in OPTIONS
            if option.metavar and option.name.replace("-", "_") in arguments.given
        }
        checks = [_from_package("check")()] if "check" in arguments.given else []
        path = arguments.path("result")
        results = [_from_package("result")(path)] if path is not None else []
        return cls("dry_run" in arguments.given, counts, checks, results)

    @property
    def algorithms(self) -> list[object]:
        """The algorithms that limit the batches."""
        if self.is_dry:
            return [_plugin(dry_limit(), "algorithm", "--dry-run")]
        if (batches := self.counts.get("overfit_batches")) is not None:
            return [_plugin(Overfit(batches=batches), "algorithm", "--overfit-batches")]
        limits = [name for name in _LIMITS if name in self.counts]
        if not limits:
            return []
        train, evaluation = map(self.counts.get, _LIMITS)
        limit = LimitBatches(train_batches=train, eval_batches=evaluation)
        return [_plugin(limit, "algorithm", " ".join(map(flag, limits)))]

    @property
    def callbacks(self) -> list[object]:
        """The callbacks that measure the run."""
        return [_plugin(result.cost, "callback", "--result") for result in self.results]

    @property
    def observers(self) -> list[Observer]:
        """The observers that the trainer puts around the hooks."""
        return [EveryBatch(), *self.checks] if self.is_dry else self.checks

    @property
    def status(self) -> int:
        """The exit status of a successful run: 1 if the check found a problem, else 0."""
        return max((check.status for check in self.checks), default=0)

    def configured(self, configuration: Configuration) -> Configuration:
        """Returns the configuration with the modes' settings, which take precedence."""
        if not self.is_dry:
            return configuration
        values = {**dry_settings(), "run_dir": self._folder}
        layer = Layer("flag", {name: Value(value, "--dry-run") for name, value in values.items()})
        return replace(configuration, layers=(layer, *configuration.layers))

    def lines(self) -> Iterator[str]:
        """Yields the lines of the header that describe the modes."""
        if self.is_dry:
            yield "dry run: two epochs of two batches; the run dir is removed at the end"
        if (batches := self.counts.get("overfit_batches")) is not None:
            yield f"overfit: trains and evaluates on the same batches, {batches} of them"

    def fit(self, trainer: Trainer) -> Result:
        """Trains in these modes, and writes the result if `--result` is set.

        Raises:
            UsageError: a mode needs eval data, and the task has none.
            EventloopError: the result can't be written.
        """
        for name in ("sanity_eval", "limit_eval_batches"):
            if name in self.counts and not trainer.state.eval_dataloaders:
                raise UsageError(
                    f"{flag(name)} has no effect: the task has no eval data",
                    fix=f"leave {flag(name)} out, or set Task(eval_dataloaders=...)",
                )
        if (num_batches := self.counts.get("sanity_eval")) is not None:
            trainer.sanity_eval(num_batches)
        result = rehearse(trainer) if self.is_dry else trainer.fit()
        for measured in self.results:
            measured.write(trainer, result)
        return result

    def __enter__(self) -> Self:
        if self.is_dry:
            folder = TemporaryDirectory(prefix="eventloop-dry-run-")
            self._folder = self._stack.enter_context(folder)
        for check in self.checks:
            self._stack.enter_context(check)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _plugin(target: object, role: Role, flags: str) -> Plugin:
    """Returns the record of a plugin that a flag of the command adds."""
    return Plugin("", role, target, source=flags, by="flag")


def _from_package(name: str) -> Any:
    """Imports the entry point of an option, from the group `eventloop.options`.

    Raises:
        UsageError: the package of the option isn't installed.
        PluginError: the package can't be used.
    """
    installed = extensions("eventloop.options")
    option = next((option for option in installed if option.name == name), None)
    if option is None:
        raise UsageError(
            f"--{name} needs {distribution_of(name)}, which isn't installed", fix=install(name)
        )
    if problem := extension_problems(installed, {}).get(option):
        raise problem
    return imported_callable(option)
