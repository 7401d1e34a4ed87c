"""The Trainer: opens a run, trains, evaluates, predicts and exports; `fit` does so in one call."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, Self, Unpack

from torch import Tensor, nn
from torch.optim import Optimizer

from eventloop.checkpoint.capture import restore_model
from eventloop.checkpoint.checkpoint_export import warn_of_misfits, with_names_of, with_tied
from eventloop.checkpoint.structure import fit_buffers
from eventloop.clock import Time, resolve
from eventloop.config.configuration import Configuration
from eventloop.config.settings import SETTING_NAMES
from eventloop.config.value_sources import setting_for
from eventloop.errors import (
    EventloopError,
    SettingError,
    TaskError,
    a,
    counted,
    failures_of,
    first_of,
    note_later,
)
from eventloop.fixes import allowing, as_set, in_command
from eventloop.plugin.new_algorithms import affects_training, first_runs
from eventloop.run.announcements import Announcements
from eventloop.run.differences import NOTHING, Allowed
from eventloop.run.hidden_frames import short_in_notebooks
from eventloop.run.open import Request, open_run, refuse_task_values
from eventloop.run.result import Result, plugin_table
from eventloop.run.start_checks import check_trainable, warn_of_zero_rates
from eventloop.signals import Signals, is_interruption
from eventloop.state import State
from eventloop.task import Task
from eventloop.task.value_checks import refuse_arguments_of_fit
from eventloop.training.evaluation import try_evaluation
from eventloop.training.stops import Stopped, stop_of, warn_of_repeated_stop
from eventloop.vocabulary import METHODS, SETTINGS, STATE, TASK, TRAINER, known_as

if TYPE_CHECKING:
    from eventloop.checkpoint.checkpoint_files import Checkpoint
    from eventloop.config.settings import SettingValues
    from eventloop.plugin.observe import Observer
    from eventloop.plugin.records import Plugin
    from eventloop.plugin.registry import Registry


class Trainer:
    """Trains a task.

    Args:
        task: a `Task`, or an object or module with hook implementations.
        algorithms: plugins that can change the training, in addition to installed ones.
        callbacks: plugins that only observe it, in addition to installed ones.
        settings: how to train; see `Settings`. They override the environment and files.

    Raises:
        EventloopError: the task, a plugin or a setting can't be used; subclasses say which.
    """

    def __init__(
        self,
        task: object,
        *,
        algorithms: Sequence[object] = (),
        callbacks: Sequence[object] = (),
        **settings: Unpack[SettingValues],
    ) -> None:
        with short_in_notebooks():
            refuse_task_values(settings)
            configuration = Configuration.read(flags=settings)
            self._open(Request(task, configuration, algorithms, callbacks))

    @classmethod
    def of_request(cls, request: Request) -> Self:
        """Returns a trainer of all that a command or a tool may request; raises as `Trainer` does."""
        trainer = cls.__new__(cls)
        with short_in_notebooks():
            trainer._open(request)
        return trainer

    def _open(self, request: Request) -> None:
        self._run = run = open_run(request)
        self.state = run.state
        self._hooks = run.active.plans
        self._loop = run.loop
        self._finalizer = weakref.finalize(self, run.close)
        is_unnamed = run.state.settings.run_dir is None and request.scratch is None
        self._announcements = Announcements(run.state, makes_folder=is_unnamed)
        self._has_announced = False

    def __repr__(self) -> str:
        state = self.state
        epochs = counted(state.clock.epoch, "epoch")
        batches = counted(state.clock.batch, "batch", "batches")
        end = state.settings.max_duration or "no end"
        names = ", ".join(plugin.name for plugin in self.plugins if plugin.role != "task") or "none"
        is_open = "" if self._run.is_open else ", closed"
        return (
            f"<Trainer: {epochs}, {batches} of {end}; {state.device}, {state.precision.name}; "
            f"plugins: {names}; run_dir={str(state.run_dir)!r}{is_open}>"
        )

    def _repr_html_(self) -> str:
        """Returns the plugins of the run, for a notebook."""
        return f"<code>{escape(repr(self))}</code>{plugin_table(self.plugins, self.off)}"

    @property
    def plugins(self) -> tuple[Plugin, ...]:
        """The active plugins in order, from the task to the callbacks."""
        return tuple(plugin for plugin in self.assembly.plugins if plugin.role != "core")

    @property
    def off(self) -> tuple[Plugin, ...]:
        """The installed plugins that are inactive, each with the reason."""
        return self.assembly.off

    @property
    def assembly(self) -> Registry:
        """The hook implementations of the plugins in order, and the owners of actions."""
        return self._run.active.assembly

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the header: where the run continues, and what the core and plugins announce."""
        return self._run.notes

    if not TYPE_CHECKING:  # a type checker knows the attributes

        def __getattr__(self, name: str) -> Any:
            if name in dir(type(self)):
                # A property has raised an AttributeError: raise it again.
                return object.__getattribute__(self, name)
            if name in STATE or name in dir(State):
                hint = f"; here it is trainer.{STATE.get(name, f'state.{name}')}"
            else:
                attributes = (attr for attr in dir(type(self)) if not attr.startswith("_"))
                hint = known_as(name, METHODS, attributes)
            raise AttributeError(f"the trainer has no {name!r}{hint}")

    @property
    def evaluates(self) -> bool:
        """Whether there are eval data, or a plugin that evaluates without them."""
        return bool(self.state.eval_dataloaders) or self._run.active.evaluates

    def first_runs(self, directory: Path | None = None) -> list[str]:
        """Returns a line for each installed plugin that affects training for the first time here.

        These are algorithms, and callbacks that can stop a run. Each plugin is returned once.

        Args:
            directory: the working directory of the command, which prints the lines, the run folder and
                the reason of a stop. If None, `fit` writes them to stderr.
        """
        self._has_announced = True
        self._announcements.by_command = directory is not None
        if self.state.rank != 0:
            return []
        installed = [
            plugin
            for plugin in self.plugins
            if plugin.found and plugin.found.local is None and affects_training(plugin)
            if not self._run.configuration.who_insists(plugin.found)
        ]
        return first_runs(installed, self.assembly.names, directory)

    def owner(self, action: str) -> Plugin:
        """Returns the owner of an action: a plugin, else the task, else the core.

        Raises:
            ValueError: there is no such action.
            PluginError: it has no implementation.
        """
        hooks = self.assembly.hooks
        if action not in hooks or hooks[action].kind != "action":
            raise ValueError(f"no action is named {action!r}{hooks.hint(action)}")
        return self.assembly.owner(action)

    def fit(self, until: str | Time | None = None, *others: Never, **unknown: Never) -> Result:
        """Trains until `until`, or until `max_duration`, from where the last fit ended.

        After an exception it can be called again, and continues where the last call raised.

        Args:
            until: when to stop, counted from the start of the run; it may exceed `max_duration`.
            others, unknown: an error that says where a model, data or a setting belongs.

        Raises:
            TypeError: `until` isn't a time, or there are other arguments.
            EventloopError: there are no training data, or no end of the run.
            KeyboardInterrupt: the process received SIGINT; a checkpoint was saved, and `fit` can be
                called again.
            SystemExit: the process received SIGTERM; a checkpoint was saved.
            BaseException: an exception of the task or a plugin, after `exception` was called on every
                plugin.
        """
        refuse_arguments_of_fit(until, others, unknown)
        state = self.state
        self._require_open()
        if not self._has_announced:  # as a command does in its header
            self._announcements.write(self.first_runs())
        self._announcements.folder()
        signals = Signals(state)
        with self._run.guarded():
            duration = self._resolved("max_duration", state.settings.max_duration)
            end = duration if until is None else self._resolved("until", Time(until))
            if end is None:
                raise SettingError(
                    "max_duration is not set",
                    fix='set max_duration, for example max_duration="10ep", or call '
                    'fit(until="10ep")',
                )
            check_trainable(self._run, end)
            state.until = end
            stopped = self._earlier_stop()
            first_batch = None
            if reason := self._why_nothing_to_train(until):
                if state.rank == 0:  # all ranks know it
                    warnings.warn("nothing to train: " + reason, stacklevel=2)
                    self._run.saver.tidy(state)
            else:
                warn_of_zero_rates(state)
                overridden = None
                # A fit that raised hasn't reached its stop; the fit that continues it will.
                first_batch = -1 if self._loop.was_interrupted else state.clock.batch
                if not self._loop.was_interrupted or is_interruption(state.stop_reason):
                    # After a signal, or with `until`, the caller clearly wants to continue: no warning.
                    is_asked_for = is_interruption(state.stop_reason) or until is not None
                    overridden = None if is_asked_for else stopped
                    state.stop_reason = None
                self._run.processes.exchange.start_fit()
                # From here on a signal must not be lost: it stops the run and saves a checkpoint.
                with signals:
                    try:
                        self._loop.fit(state, duration, overridden)
                    finally:
                        self._announcements.folder()
                    if signals.agree(self._run.processes):
                        self._loop.save_once(state)
                stopped = stop_of(state)
        signals.pass_on()
        if stopped is not None and first_batch is not None:
            self._announce(stopped, first_batch)
        return Result(
            metrics={name: dict(results) for name, results in state.eval_metrics.items()},
            history=list(self._run.bookkeeping.history),
            run_dir=state.run_dir,
            model=state.model,
            tested_with=self._run.best_weights.lent,
            stopped=stopped,
        )

    def eval(self) -> dict[str, dict[str, Tensor]]:
        """Evaluates over the task's eval data loaders; returns metrics by data loader and name.

        Raises:
            TaskError: the task has no eval data loader.
        """
        self._require_eval_data()
        state = self.state
        with self._run.guarded(), state.evaluating(state.eval_dataloaders):
            metrics = self._hooks.evaluate(state)
            self._loop.deliver_everything(self.state)
        return {name: dict(results) for name, results in metrics.items()}

    def sanity_eval(self, num_batches: int = 2) -> None:
        """Evaluates a few batches and discards the results, to find errors early.

        Call it before `fit`. No event fires, and it leaves metrics, results and the global random
        generators unchanged.

        Args:
            num_batches: the largest number of batches of each eval data loader.

        Raises:
            TaskError: the task has no eval data loader.
        """
        if num_batches < 1:
            raise ValueError(f"sanity_eval({num_batches}) evaluates nothing; give 1 batch or more")
        self._require_eval_data()
        with self._run.guarded():
            try_evaluation(self._hooks, self.state, self._loop.move, num_batches)

    def predict(self, dataloader: Any) -> list[Any]:
        """Returns the outputs for a data loader: a list with an entry for each batch, on the host.

        Outputs aren't concatenated, since batches may have outputs of different shapes; use
        `torch.cat(outputs)`.

        Raises:
            TaskError: `dataloader` isn't an iterable of batches, or has none.
        """
        self._require_open()
        if isinstance(dataloader, Tensor) or not isinstance(dataloader, Iterable):
            raise TaskError(
                f"predict takes a data loader, not {a(type(dataloader).__name__)}",
                fix="give an iterable of batches: a DataLoader, or a list, [batch]",
            )
        with self._run.guarded():
            return self._hooks.predict(self.state, dataloader)

    def export(self, path: str | Path, *, best: bool = False) -> Path:
        """Writes the weights that evaluation uses to a safetensors file; returns its path.

        Args:
            path: the path of the file. Plugins may write other formats, or folders.
            best: write the weights of the best evaluation instead of the current ones; needs the
                setting `checkpoint_best`.

        Raises:
            SettingError: `best` is set, but no checkpoint of a best evaluation has been saved.
            EventloopError: the file can't be written.
        """
        self._require_open()
        with self._run.guarded():
            if not best:
                return self._hooks.export(self.state, Path(path))
            with self._run.best_weights.to_export(self.state) as best_checkpoint:
                if best_checkpoint is None:
                    raise SettingError(
                        "no checkpoint of a best evaluation has been saved",
                        fix='set checkpoint_best, for example checkpoint_best="valid/loss", and evaluate',
                    )
                return self._hooks.export(self.state, Path(path))

    def load_weights(
        self, path: str | Path, *, strict: bool = True, as_evaluated: bool = False
    ) -> None:
        """Loads only weights into the model, tensor by tensor.

        Args:
            path: a file that `export` wrote; the folder of a pretrained model in safetensors files; a
                checkpoint; or a run folder, whose newest valid checkpoint is used. Plugins may read
                other formats, such as a folder of adapters.
            strict: whether missing and unexpected names are errors. Otherwise they cause a warning,
                and weights that are missing stay unchanged.
            as_evaluated: whether plugins that evaluate with other weights, such as an average, restore
                these from the checkpoint. Evaluation then gives the results that the run had.

        Raises:
            TaskError: the weights can't be read, or don't fit the model.
            CheckpointError: the checkpoint is damaged.
        """
        with self._run.guarded():
            try:
                averaging = self.assembly.exporting if as_evaluated else ()
                weights, states, left_out = self._hooks.read_weights(
                    self.state, Path(path), averaging
                )
                weights = with_names_of(self.state.model, weights)
                self._fit_buffers(weights, path)
                if not left_out:
                    weights = with_tied(self.state.model, weights)
                if not strict:
                    warn_of_misfits(self.state.model.state_dict(), weights, path)
                self._run.capture.plugins.put(states)
                restore_model(self.state, self._hooks, weights, left_out, strict=strict)
            except (OSError, RuntimeError) as error:
                raise TaskError(
                    f"the weights in {path} can't be loaded: {error}",
                    fix="give a file that trainer.export(FILE) or `eventloop fit --export FILE` wrote for "
                    "this model",
                ) from error

    def _fit_buffers(self, weights: Mapping[str, Any], path: object) -> None:
        """Resizes buffers to the shapes of loaded weights, since buffers may grow in training; warns of it."""
        resized = fit_buffers(self.state.model, weights)
        if resized and self.state.rank == 0:
            warnings.warn(
                f"{path} has other shapes of {counted(len(resized), 'buffer')} than the model, which "
                f"takes them: {first_of(resized)}",
                stacklevel=3,
            )

    def close(self) -> None:
        """Closes every plugin; further calls have no effect."""
        self._finalizer()

    def _earlier_stop(self) -> Stopped | None:
        """Returns why an earlier fit was stopped, in this process or in the resumed run."""
        start = self._run.start
        moment = self.state.clock.moment()
        if self._loop.resume_point.is_loaded and start.stop_reason is not None:
            return Stopped(start.stop_reason, start.stopped_by, moment)
        return stop_of(self.state)

    def _announce(self, stopped: Stopped, first_batch: int) -> None:
        """Prints why a fit was stopped; warns if it hasn't trained at all."""
        state = self.state
        if state.clock.batch == first_batch:
            warn_of_repeated_stop(state, stopped)
        elif not stopped.is_planned:
            end = "" if state.clock.reached(state.until) else f", before {state.until}"
            self._announcements.write([f"{stopped}{end}"])

    def _why_nothing_to_train(self, until: str | Time | None) -> str:
        """Returns why a fit would do nothing, or ""."""
        state = self.state
        stopped = self._run.start.stop_reason
        done = f"epoch {state.clock.epoch_number}, batch {state.clock.batch}"
        is_finished = self._loop.is_finished and state.clock.reached(state.until)
        # A run that was killed after a shorter fit has also completed the end of that fit.
        if is_finished or state.clock.passed(state.until):
            return f"{state.until} is done ({done}); " + _further(state.until)
        if self._loop.resume_point.is_loaded and stopped is not None and until is None:
            return f"the run was stopped ({done}): {stopped}"
        return ""

    def _require_open(self) -> None:
        if not self._run.is_open:
            raise EventloopError(
                "the trainer is closed, and so are its plugins",
                fix="call it inside `with Trainer(...) as trainer:`, or build another trainer",
            )

    def _require_eval_data(self) -> None:
        self._require_open()
        if not self.evaluates:
            raise TaskError(
                "the task has no eval data loader", fix="give Task(eval_dataloaders=...)"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
            return
        for failure in failures_of(self.close):
            note_later(error, failure)

    def _resolved(self, name: str, time: Time | None) -> Time | None:
        if time is None:
            return None
        try:
            return resolve(time, self.state.settings.max_duration, self.state.epoch_length)
        except ValueError as error:
            raise SettingError(f"{name}: {error}", fix=f"write {name} in batches: 100ba") from None


def _further(end: Time) -> str:
    """Returns the flag or the call that extends a run."""
    longer = str(Time(end.value * 2, end.unit))
    if in_command():
        return f"{as_set(max_duration=longer)} with {allowing('config_change')} goes further"
    return f"`fit(until={longer!r})` goes further"


@dataclass(frozen=True)
class TrainerBuilder:
    """Builds trainers with more than a task and plugins, for tools and tests.

    Args:
        configuration: settings of environment and files; by default those of this process.
        observers, allowed, origin, checkpoint: see `Request`.
    """

    configuration: Configuration | None = None
    observers: Sequence[Observer] = ()
    allowed: Allowed = NOTHING
    origin: Mapping[str, Any] | None = None
    checkpoint: Checkpoint | None = None

    def build(
        self,
        task: object,
        *,
        algorithms: Sequence[object] = (),
        callbacks: Sequence[object] = (),
        **settings: Unpack[SettingValues],
    ) -> Trainer:
        """Builds a trainer; the arguments are those of `Trainer`.

        Raises:
            EventloopError: as `Trainer` does.
        """
        refuse_task_values(settings)
        if settings and self.configuration is not None:
            raise TypeError("give settings as keywords or in `configuration`, not both")
        configuration = self.configuration or Configuration.read(flags=settings)
        request = Request(
            task,
            configuration,
            algorithms,
            callbacks,
            observers=self.observers,
            allowed=self.allowed,
            origin=self.origin,
            checkpoint=self.checkpoint,
        )
        return Trainer.of_request(request)


_OF_TRAINER = ("algorithms", "callbacks")


def fit(
    model: nn.Module | Callable[[], nn.Module],
    train_dataloader: Any,
    *,
    optimizer: Callable[[nn.Module], Optimizer | Mapping[str, Optimizer]],
    max_duration: str | Time,
    loss: Callable[[Any, Any], Tensor] | None = None,
    **given: Any,
) -> Result:
    """Trains a model: `Trainer(Task(...), ...).fit()` in one call.

    Args:
        model, train_dataloader, optimizer, loss: see `Task`.
        max_duration: how long to train, as a time: "10ep", "5000ba".
        given: more values of `Task`, such as `eval_dataloaders` and `metrics`, and settings,
            `algorithms` and `callbacks` of `Trainer`.

    Raises:
        EventloopError: as `Trainer` and `Trainer.fit` do.
    """
    if "settings" in given:
        raise SettingError(
            "settings are keywords here", fix='write fit(..., seed=1) for {"seed": 1}'
        )
    names = inspect.signature(Task).parameters.keys() - {*_OF_TRAINER}
    settings = {word: setting_for(word, "keyword", given.get(word)) for word in SETTINGS}
    words = {**settings, **TRAINER, **TASK}
    for name in given.keys() - names - {*_OF_TRAINER, *SETTING_NAMES}:
        if hint := known_as(name, words, [*names, *_OF_TRAINER, *SETTING_NAMES]):
            raise SettingError(
                f"fit(...) has no argument {name!r}{hint}", fix="rename the keyword or leave it out"
            )
    of_task = {name: given.pop(name) for name in names & given.keys()}
    task = Task(
        model=model, train_dataloader=train_dataloader, optimizer=optimizer, loss=loss, **of_task
    )
    with short_in_notebooks(), Trainer(task, max_duration=max_duration, **given) as trainer:
        return trainer.fit()
