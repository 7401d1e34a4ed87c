"""What the parts of a run with Composer's objects share: those objects, and the mirror once it is there."""

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
    """What a plugin asks of the task, where that is a model of Composer's."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers, whose groups algorithms change with the model."""

    @property
    def label(self) -> str:
        """What Composer's State calls the training data."""

    @property
    def num_batches(self) -> int | None:
        """How many batches an epoch has; None for all that there are."""

    @property
    def microbatch_size(self) -> int | None:
        """How many samples go through the model at once; None for a batch."""

    def eval_length(self, label: str) -> int | None:
        """Returns how many batches of an eval set are used; None for all."""

    def take_model(self, state: State) -> None:
        """Sets what of Composer's State depends on the model as algorithms have left it."""

    def begin(self, state: State) -> None:
        """Does what comes before the first batch."""

    def end_batch(self, state: State) -> None:
        """Does what comes before Composer's timestamp moves on."""

    def end_epoch(self, state: State) -> None:
        """Likewise, when an epoch has ended."""

    def ask_evaluators(self, state: State, event: str) -> bool:
        """Returns whether an eval set is due at an event."""

    def end_eval(self, state: State) -> None:
        """Shows the results of an eval set in Composer's State."""

    def saved(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of it."""

    def put_saved(self, saved: Mapping[str, Any]) -> None:
        """Restores what `saved` returned."""


class Session:
    """The objects of Composer's that take part in a run.

    Args:
        algorithms, callbacks, loggers: Composer's, in the order in which they were given.
        passes: more of Composer's passes, which order its algorithms.
        profiler: Composer's, or None.
        run_name: what Composer's State calls the run; the name of its folder unless set.

    Attributes:
        is_watched: whether there are callbacks or loggers.
        in_fit: whether an evaluation now belongs to a fit.
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
        own = [one for one in callbacks if isinstance(one, LoggerDestination)]
        self.algorithms = list(algorithms)
        self.loggers = [*loggers, *own]
        self.callbacks = [one for one in callbacks if one not in own]
        self._passes = passes
        self._profiler = profiler
        self._run_name = run_name
        watching = [*self.callbacks, *self.loggers]
        self.is_watched = bool(watching)
        self.in_fit = False
        self.events = {one.value: one for one in Event if listens(one, self.algorithms, watching)}
        self._mirror: Mirror | None = None

    @property
    def mirror(self) -> Mirror:
        """Composer's State, Logger and Engine; from `begin` on."""
        assert self._mirror is not None
        return self._mirror

    @property
    def has_begun(self) -> bool:
        """Whether the mirror is there."""
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
        """Runs an event of Composer's, if anything listens to it."""
        if name in self.events:
            self.mirror.fire(self.events[name])

    def firing(self, name: str) -> Callable[[State], None]:
        """Returns a hook that runs an event."""
        event = self.events[name]

        def fire(state: State) -> None:
            self.mirror.fire(event)

        return fire

    def show_data(self, state: State, task: TrainedModel | None) -> None:
        """Shows Composer how long the run is, and over which data."""
        mirror = self.mirror
        if not task and (duration := state.duration or state.until):
            mirror.set_duration(to_theirs(duration))
        # An empty tuple stands for no data loader.
        if state.train_dataloader != () and mirror.theirs.dataloader is not state.train_dataloader:
            label, length = (task.label, task.num_batches) if task else ("train", None)
            mirror.set_loader(state.train_dataloader, label, length)
            mirror.theirs.train_dataloader = state.train_dataloader
