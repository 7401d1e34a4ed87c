"""State shared by the parts of a run: Composer's objects, and their mirror of eventloop's State."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from composer.core import Algorithm, Callback, Event
from composer.loggers import LoggerDestination
from torch.optim import Optimizer

from eventloop import State
from eventloop_composer.engine import listens
from eventloop_composer.mirror import Mirror
from eventloop_composer.times import to_theirs


class TrainedModel(Protocol):
    """The interface of the task of a model of Composer, as the plugin uses it."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers, whose groups algorithms change with the model."""

    @property
    def label(self) -> str:
        """The name of the training data in Composer's State."""

    @property
    def num_batches(self) -> int | None:
        """The number of batches in an epoch; None for all."""

    @property
    def microbatch_size(self) -> int | None:
        """The number of samples in a microbatch; None for a whole batch."""

    def eval_length(self, label: str) -> int | None:
        """Returns the number of batches of an eval set to use; None for all."""

    def take_model(self, state: State) -> None:
        """Sets the attributes of Composer's State that depend on the model, after algorithms changed it."""

    def begin(self, state: State) -> None:
        """Called before the first batch."""

    def end_batch(self, state: State) -> None:
        """Called at the end of a batch, before Composer's timestamp advances."""

    def end_epoch(self, state: State) -> None:
        """Called at the end of an epoch, before Composer's timestamp advances."""

    def ask_evaluators(self, state: State, event: str) -> bool:
        """Whether an eval set is due at an event."""

    def end_eval(self, state: State) -> None:
        """Shows the results of an eval set in Composer's State."""

    def saved(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""

    def put_saved(self, saved: Mapping[str, Any]) -> None:
        """Restores the result of `saved`."""


class Session:
    """The objects of Composer in a run.

    Args:
        algorithms, callbacks, loggers: Composer's objects, in the order in which they were passed.
        passes: additional passes of Composer, which order its algorithms.
        profiler: Composer's profiler, or None.
        run_name: name of the run in Composer's State; by default the name of its folder.

    Attributes:
        is_watched: whether there are callbacks or loggers.
        in_fit: whether a current evaluation belongs to a fit.
    """

    def __init__(
        self,
        algorithms: Sequence[Algorithm],
        callbacks: Sequence[Callback],
        loggers: Sequence[LoggerDestination],
        *,
        passes: Any = None,
        profiler: Any = None,
        run_name: str | None = None,
    ) -> None:
        logging_callbacks = [
            callback for callback in callbacks if isinstance(callback, LoggerDestination)
        ]
        self.algorithms = list(algorithms)
        self.loggers = [*loggers, *logging_callbacks]
        self.callbacks = [callback for callback in callbacks if callback not in logging_callbacks]
        self._passes = passes
        self._profiler = profiler
        self._run_name = run_name
        watching = [*self.callbacks, *self.loggers]
        self.is_watched = bool(watching)
        self.in_fit = False
        self.events = {
            event.value: event for event in Event if listens(event, self.algorithms, watching)
        }
        self._mirror: Mirror | None = None

    @property
    def mirror(self) -> Mirror:
        """Composer's State, Logger and Engine; from `begin` on."""
        assert self._mirror is not None
        return self._mirror

    @property
    def has_begun(self) -> bool:
        """Whether the mirror exists."""
        return self._mirror is not None

    def begin(self, state: State, task: TrainedModel | None) -> None:
        """Makes Composer's State, Logger and Engine."""
        self._mirror = mirror = Mirror(
            state,
            algorithms=self.algorithms,
            callbacks=self.callbacks,
            loggers=self.loggers,
            passes=self._passes,
            optimizers=task.optimizers if task else (),
            run_name=self._run_name or state.run_dir.name,
        )
        if self._profiler is not None:
            mirror.theirs.profiler = self._profiler
            self._profiler.state = mirror.theirs
        if task:
            mirror.theirs.device_train_microbatch_size = task.microbatch_size
            state.model.logger = mirror.logger

    def fire(self, name: str) -> None:
        """Runs an event of Composer, if any object listens to it."""
        if name in self.events:
            self.mirror.fire(self.events[name])

    def firing(self, name: str) -> Callable[[State], None]:
        """Returns a hook that runs an event."""
        event = self.events[name]

        def fire(state: State) -> None:
            self.mirror.fire(event)

        return fire

    def show_data(self, state: State, task: TrainedModel | None) -> None:
        """Shows Composer the duration and the data of the run."""
        mirror = self.mirror
        if not task and (duration := state.duration or state.until):
            mirror.set_duration(to_theirs(duration))
        # An empty tuple means no data loader.
        if state.train_dataloader != () and mirror.theirs.dataloader is not state.train_dataloader:
            label, length = (task.label, task.num_batches) if task else ("train", None)
            mirror.set_loader(state.train_dataloader, label, length)
            mirror.theirs.train_dataloader = state.train_dataloader
