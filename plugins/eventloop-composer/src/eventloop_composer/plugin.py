"""The plugin: fires each event of Composer at its hook of eventloop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from eventloop import Moment, State, hookimpl
from eventloop_composer.importing import declare_operators, import_composer
from eventloop_composer.named import objects_of

if TYPE_CHECKING:
    from eventloop_composer.mirror import Mirror
    from eventloop_composer.session import Session, TrainedModel

declare_operators()  # for any run: torchmetrics imports torchvision if it is installed

# Events that fire in the hook of the same name, without further work.
SAME = (
    "before_dataloader",
    "after_dataloader",
    "before_forward",
    "after_forward",
    "before_loss",
    "after_loss",
    "before_backward",
    "after_backward",
    "after_train_batch",
    "batch_checkpoint",
    "eval_batch_start",
    "eval_before_forward",
    "eval_after_forward",
    "predict_batch_start",
    "predict_before_forward",
    "predict_after_forward",
)


class Composer:
    """Runs algorithms, callbacks and loggers that were written for MosaicML Composer, unchanged.

    They use Composer's own State and Logger, and Composer's Engine calls them in its order. Name each as
    `composer.algorithms.MixUp` or `package.module:Class`, with arguments as
    `{composer.algorithms.MixUp: {alpha: 0.2}}`; in Python, instances work, too.

    Args:
        algorithms: Composer's algorithms, in their order.
        callbacks: Composer's callbacks.
        loggers: Composer's logger destinations, which receive the numbers of Composer's trainer and callbacks.

    Raises:
        PluginError: Composer isn't installed, or an object doesn't exist or can't be built.

    Attributes:
        session: state shared by the parts of the run.
        algorithms: Composer's algorithms.
    """

    # Off until one of these options is set.
    wakes_with = ("algorithms", "callbacks", "loggers")
    needs_eval_data = True

    def __init__(
        self,
        *,
        algorithms: list[Any] | None = None,
        callbacks: list[Any] | None = None,
        loggers: list[Any] | None = None,
    ) -> None:
        import_composer()
        from composer.core import Algorithm, Callback
        from composer.loggers import LoggerDestination

        from eventloop_composer.session import Session

        session = Session(
            objects_of("algorithms", algorithms, Algorithm),
            objects_of("callbacks", callbacks, Callback),
            objects_of("loggers", loggers, LoggerDestination),
        )
        self._run(session, None)

    @classmethod
    def of(cls, session: Session, task: TrainedModel) -> Self:
        """Returns the plugin for the task of a model of Composer."""
        plugin = cls.__new__(cls)
        plugin._run(session, task)
        return plugin

    def _run(self, session: Session, task: TrainedModel | None) -> None:
        from eventloop_composer.gradients import SavedGradients
        from eventloop_composer.steps import Steps

        self.session = session
        self._task = task
        self.algorithms = session.algorithms
        self._loaded: Mapping[str, Any] | None = None
        self._is_complete = False
        for name in SAME:
            if name in session.events:
                setattr(self, name, hookimpl(session.firing(name)))
        self._gradients = SavedGradients(session.is_watched)
        self._steps = Steps(session)
        for component in (self._gradients, self._steps):
            for name in component.hooks:
                setattr(self, name, getattr(component, name))

    @property
    def mirror(self) -> Mirror:
        """Composer's State, Logger and Engine; from `init` on."""
        return self.session.mirror

    @hookimpl
    def init(self, state: State) -> None:
        """The event INIT; creates Composer's State."""
        self.session.begin(state, self._task)
        self.session.fire("init")
        self.mirror.logs.begin()
        state.model = self.mirror.theirs.model
        self.mirror.saved.begin_layers()
        if self._task:
            self._task.take_model(state)

    @hookimpl
    def before_load(self, state: State) -> None:
        """The event BEFORE_LOAD of a resumed run."""
        self._complete(state)

    @hookimpl
    def after_load(self, state: State) -> None:
        """The event BEFORE_LOAD of a new run, and the event AFTER_LOAD."""
        if not self._is_complete:
            self._complete(state)
        theirs = self.mirror.theirs
        theirs.timestamp = self.mirror.time_now()
        previous_optimizers = list(theirs.optimizers)
        self.session.fire("after_load")
        self._steps.take_optimizers(state, previous_optimizers)
        if self._loaded is not None:
            self._steps.put_wrappers(self._loaded["optimizers"])
        theirs.model = state.wrapped_model
        if self._task:
            self._task.begin(state)

    def _complete(self, state: State) -> None:
        """Shows Composer the objects created since `init`, and fires BEFORE_LOAD."""
        self._is_complete = True
        self._steps.check(state)
        theirs = self.mirror.theirs
        theirs.optimizers = tuple(state.optimizers.values())
        if not self._task:
            theirs.schedulers = [
                scheduler for pairs in state.schedulers.values() for _, scheduler in pairs
            ]
            theirs.device_train_microbatch_size = state.microbatch_size
        self.show_data(state)
        self.session.fire("before_load")

    def show_data(self, state: State) -> None:
        """Shows Composer the duration and the data of the run."""
        self.session.show_data(state, self._task)

    @hookimpl
    def fit_start(self, state: State) -> None:
        """The event FIT_START, which may replace the data loader."""
        self.session.in_fit = True
        self.show_data(state)
        mirror = self.mirror
        mirror.evaluated.start_fit()
        names = {
            f"enabled_algorithms/{type(algorithm).__name__}": True
            for algorithm in self.session.algorithms
        }
        mirror.logger.log_hyperparameters(names)
        self.session.fire("fit_start")
        if mirror.theirs.dataloader is not None:
            state.train_dataloader = mirror.theirs.dataloader
        if self._loaded is not None:
            self.mirror.saved.put_layers(self._loaded)
            self._loaded = None
        mirror.numbers.is_heard = True

    @hookimpl
    def epoch_start(self, state: State) -> None:
        """The event EPOCH_START, unless the epoch is resumed."""
        if not state.resumed:
            self.session.fire("epoch_start")
            self.mirror.logs.epoch()

    @hookimpl
    def batch_start(self, state: State) -> None:
        """The event BATCH_START."""
        self.session.fire("batch_start")
        self.mirror.logs.batch(state.count.tokens)

    @hookimpl
    def before_train_batch(self, state: State) -> None:
        """The event BEFORE_TRAIN_BATCH, after zeroing the gradients of the previous batch."""
        self._gradients.drop()
        self.session.fire("before_train_batch")

    @hookimpl
    def batch_end(self, state: State) -> None:
        """The event BATCH_END, after advancing Composer's timestamp."""
        mirror = self.mirror
        mirror.logs.loss(state.loss)
        if self._task:
            self._task.end_batch(state)
        mirror.end_batch()
        self.session.fire("batch_end")
        if self._task:
            self._task.ask_evaluators(state, "batch_end")

    @hookimpl
    def epoch_end(self, state: State) -> None:
        """The event EPOCH_END, of an epoch that is complete."""
        mirror = self.mirror
        if state.clock.batch_in_epoch:
            return
        duration = mirror.theirs.max_duration
        if duration is None or mirror.theirs.timestamp < duration:
            self.session.fire(
                "before_dataloader"
            )  # Composer's trainer asks for a batch that isn't there
            mirror.engine.run_marker_only_event("after_dataloader")
        if self._task:
            self._task.end_epoch(state)
        mirror.advance()
        self.session.fire("epoch_end")
        if self._task:
            self._task.ask_evaluators(state, "epoch_end")

    @hookimpl
    def epoch_checkpoint(self, state: State) -> None:
        """The event EPOCH_CHECKPOINT, of an epoch that is complete."""
        if not state.clock.batch_in_epoch:
            self.session.fire("epoch_checkpoint")

    @hookimpl
    def fit_end(self, state: State) -> None:
        """The event FIT_END."""
        self.mirror.logs.end()
        self.session.fire("fit_end")
        self._gradients.drop()
        self.session.in_fit = self.mirror.numbers.is_heard = False

    @hookimpl
    def eval_before_all(self, state: State) -> None:
        """The event EVAL_BEFORE_ALL; outside of a fit, EVAL_STANDALONE_START."""
        self.mirror.evaluated.begin()
        self.session.fire("eval_before_all" if self.session.in_fit else "eval_standalone_start")

    @hookimpl
    def eval_start(self, state: State) -> None:
        """The event EVAL_START, with the eval data loader active."""
        assert state.eval_name is not None
        length = self._task.eval_length(state.eval_name) if self._task else None
        mirror = self.mirror
        mirror.begin_side(state.eval_dataloaders[state.eval_name], state.eval_name, length)
        mirror.theirs.eval_timestamp = type(mirror.theirs.timestamp)()
        self.session.fire("eval_start")

    @hookimpl
    def eval_batch_end(self, state: State) -> None:
        """The event EVAL_BATCH_END."""
        theirs = self.mirror.theirs
        theirs.eval_timestamp = self.mirror.after_side_batch(theirs.eval_timestamp)
        self.session.fire("eval_batch_end")

    @hookimpl
    def eval_end(self, state: State) -> None:
        """The event EVAL_END."""
        if self._task:
            self._task.end_eval(state)
        self.session.fire("eval_end")
        self.mirror.end_side()

    @hookimpl
    def eval_after_all(self, state: State) -> None:
        """The event EVAL_AFTER_ALL; outside of a fit, EVAL_STANDALONE_END."""
        self.session.fire("eval_after_all" if self.session.in_fit else "eval_standalone_end")
        self.mirror.evaluated.end()

    @hookimpl(wrapper=True)
    def predict(self, state: State, dataloader: Any) -> Any:
        """Makes the data loader active, for the events of a prediction."""
        mirror = self.mirror
        mirror.begin_side(dataloader, "predict", None)
        mirror.theirs.predict_timestamp = type(mirror.theirs.timestamp)()
        try:
            return (yield)
        finally:
            mirror.end_side()

    @hookimpl
    def predict_start(self, state: State) -> None:
        """The event PREDICT_START."""
        self.session.fire("predict_start")

    @hookimpl
    def predict_batch_end(self, state: State) -> None:
        """The event PREDICT_BATCH_END."""
        theirs = self.mirror.theirs
        theirs.predict_timestamp = self.mirror.after_side_batch(theirs.predict_timestamp)
        self.session.fire("predict_batch_end")

    @hookimpl
    def predict_end(self, state: State) -> None:
        """The event PREDICT_END."""
        self.session.fire("predict_end")

    @hookimpl
    def exception(self, state: State, error: BaseException) -> None:
        """Records that the fit has ended."""
        self.session.in_fit = False

    @hookimpl
    def close(self, state: State) -> None:
        """Closes Composer's callbacks and loggers."""
        if self.session.has_begun:
            self.mirror.engine.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of algorithms, callbacks, wrapped optimizers and changed layers."""
        saved = self.mirror.saved.state_dict() | {"optimizers": self._steps.wrappers()}
        saved["since"] = self.mirror.since._asdict()
        if self._task:
            saved["task"] = self._task.saved()
        return saved

    def load_state_dict(self, state: Mapping[str, Any], version: str) -> None:
        """Restores the states; attributes that events at the start change are restored after these events."""
        self._loaded = state
        self._steps.restore(self.mirror.state, state["trained"])
        self.mirror.saved.load_state_dict(state)
        self.mirror.since = Moment(**state["since"])
        if self._task:
            self._task.put_saved(state["task"])
