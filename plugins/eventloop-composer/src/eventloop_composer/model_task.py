"""The task of a model of Composer: its passes, metrics, schedulers and data."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from composer.core import DataSpec, Evaluator, Event
from composer.models import ComposerModel
from composer.optim import compile_composer_scheduler
from composer.trainer._scale_schedule import scale_pytorch_scheduler  # private, 0.32.1
from composer.utils import reproducibility
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from eventloop import Count, PluginError, State, TaskError, hookimpl
from eventloop.toolbox import announce_off
from eventloop_composer.encoded import decoded, encoded
from eventloop_composer.metrics import TrainMetrics, chosen_metrics
from eventloop_composer.session import Session
from eventloop_composer.times import to_theirs


@dataclass
class Parts:
    """The arguments of Composer's trainer, without the model.

    Args:
        data: the training data; None if it is passed to `fit`.
        label: name of the data in Composer's State.
        num_batches: number of batches in an epoch; None for all.
        evaluators: the eval sets.
        optimizers: the optimizers; Composer's trainer accepts a single one.
        schedulers: schedulers of torch or Composer.
        schedule_ratio: factor on the duration of schedules and of the run.
        every_batch: whether schedulers step once per batch, not once per epoch.
        microbatch_size: size of a microbatch; None for the data loader's batches.
        counts_tokens: whether the mean of a batch's loss is over tokens, not samples.
    """

    data: DataSpec | None = None
    label: str = "train"
    num_batches: int | None = None
    evaluators: Sequence[Evaluator] = ()
    optimizers: Sequence[Optimizer] = ()
    schedulers: Sequence[Any] = ()
    schedule_ratio: float = 1.0
    every_batch: bool = True
    microbatch_size: int | None = None
    counts_tokens: bool = False
    train_metrics: Mapping[str, Any] = field(default_factory=dict)


class ModelTask:
    """Trains a `ComposerModel` as Composer's trainer does.

    Args:
        session: mirrors eventloop's State.
        parts: the arguments of the trainer.

    Attributes:
        way_in: how users pass plugins, for messages.
    """

    loss_may_broadcast = True  # torch warns about broadcasting, as under Composer's trainer
    way_in = "algorithms=[...], or named with -p"

    def __init__(self, session: Session, parts: Parts) -> None:
        self.parts = parts
        self._session = session
        self._metrics = TrainMetrics(session, bool(parts.train_metrics))
        self._is_due = False
        self._postponed: list[str] = []
        for name in self._metrics.hooks:
            setattr(self, name, getattr(self._metrics, name))

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers, whose groups algorithms change with the model."""
        return self.parts.optimizers

    @property
    def label(self) -> str:
        """The name of the training data in Composer's State."""
        return self.parts.label

    @property
    def num_batches(self) -> int | None:
        """The number of batches in an epoch; None for all."""
        return self.parts.num_batches

    @property
    def microbatch_size(self) -> int | None:
        """The number of samples in a microbatch; None for a whole batch."""
        return self.parts.microbatch_size

    def eval_length(self, label: str) -> int | None:
        """Returns the number of batches of an eval set to use; None for all."""
        length = self._evaluator(label).subset_num_batches
        return None if length is None or length < 0 else length

    def take_model(self, state: State) -> None:
        """Sets the attributes of Composer's State that depend on the model, after algorithms changed it.

        Raises:
            TaskError: the model isn't a ComposerModel.
        """
        model = state.model
        theirs = self._session.mirror.theirs
        parts = self.parts
        if not isinstance(model, ComposerModel):
            raise TaskError(
                f"the model is {type(model).__name__}, not a ComposerModel",
                fix="derive it from composer.models.ComposerModel, or train it as a Task of eventloop",
            )
        theirs.train_metrics = deepcopy(model.get_metrics(is_train=True))
        self.take_evaluators(state, parts.evaluators)
        # From the setting, not the argument: it may have been set elsewhere.
        duration = state.settings.max_duration
        self._session.mirror.set_duration(None if duration is None else to_theirs(duration))
        if parts.data is not None:
            loader = parts.data.dataloader
            theirs.device_train_microbatch_size = parts.microbatch_size or getattr(
                loader, "batch_size", None
            )

    def take_evaluators(self, state: State, evaluators: Sequence[Evaluator]) -> None:
        """Replaces the eval sets."""
        theirs = self._session.mirror.theirs
        model = state.model
        assert isinstance(model, ComposerModel)
        self.parts.evaluators = evaluators
        metrics = model.get_metrics(is_train=False) if evaluators else {}
        theirs.eval_metrics = {
            evaluator.label: chosen_metrics(metrics, evaluator.metric_names)
            for evaluator in evaluators
        }
        theirs.evaluators = evaluators

    def begin(self, state: State) -> None:
        """Seeds again, as Composer's trainer does: random numbers drawn by surgery must make no difference."""
        reproducibility.seed_all(self._session.mirror.theirs.seed)

    # Schedulers and data.

    @hookimpl
    def build_schedulers(self, state: State) -> dict[str, Any]:
        """Makes Composer's schedulers; the plugin steps them when Composer's trainer would.

        Raises:
            PluginError: a plugin made the optimizers, which the schedulers wouldn't affect.
        """
        optimizers_of_run = list(state.optimizers.values())
        if self.parts.schedulers and any(
            optimizer not in optimizers_of_run for optimizer in self.parts.optimizers
        ):
            raise PluginError(
                f"a plugin has made the optimizers {', '.join(map(repr, state.optimizers))}, which the "
                "schedulers of Composer's trainer wouldn't move",
                fix="leave schedulers out, or switch the plugin off",
            )
        self._session.show_data(state, self)
        self.set_schedulers(self.parts.schedulers, self.parts.schedule_ratio)
        return {}

    def set_schedulers(self, schedulers: Sequence[Any], ratio: float) -> None:
        """Uses torch's schedulers unchanged, and compiles Composer's schedulers into torch's."""
        theirs = self._session.mirror.theirs
        torch_schedulers: list[LRScheduler] = []
        for scheduler in schedulers:
            if isinstance(scheduler, LRScheduler):
                scale_pytorch_scheduler(scheduler, ratio)
                torch_schedulers.append(scheduler)
            else:
                torch_schedulers.append(compile_composer_scheduler(scheduler, theirs, ratio))
        theirs.schedulers = torch_schedulers

    @hookimpl
    def count_batch(self, state: State, batch: Any) -> Count:
        """Counts samples and tokens by the data's DataSpec."""
        data = self._data(state)
        return Count(data.get_num_samples_in_batch(batch), data.get_num_tokens_in_batch(batch))

    @hookimpl
    def weigh_microbatch(self, state: State) -> int:
        """Weighs by loss-generating tokens if the trainer was configured to, else by samples."""
        data = self._data(state)
        if state.microbatch is None or not self.parts.counts_tokens:
            samples: int = data.get_num_samples_in_batch(
                state.batch if state.microbatch is None else state.microbatch
            )
            return samples
        tokens: int = data.get_num_tokens_in_batch(state.microbatch, token_type="loss_generating")
        return tokens

    @hookimpl
    def split_batch(self, state: State) -> Sequence[Any]:
        """Splits the batch by the data's DataSpec."""
        data = self._data(state)
        theirs = self._session.mirror.theirs
        size = state.microbatch_size or theirs.device_train_microbatch_size
        microbatches = [state.batch] if size is None else data.split_batch(state.batch, size)
        return [data.microbatch_transforms(microbatch) for microbatch in microbatches]

    @hookimpl(tryfirst=True)
    def after_dataloader(self, state: State) -> None:
        """Transforms the batch."""
        state.batch = self._data(state).batch_transforms(state.batch)

    @hookimpl
    def should_end_epoch(self, state: State) -> bool:
        """Whether the epoch has reached its number of batches."""
        num_batches = self.parts.num_batches
        return num_batches is not None and state.clock.batch_in_epoch >= num_batches

    @hookimpl
    def after_load(self, state: State) -> None:
        """Announces which installed algorithms stay off."""
        announce_off(state, self.way_in)

    # The passes.

    @hookimpl
    def forward(self, state: State) -> Any:
        """Calls the model with the batch as a whole."""
        batch = state.batch if state.microbatch is None else state.microbatch
        return state.active_model(batch)

    @hookimpl
    def loss(self, state: State) -> Tensor:
        """Calls the model's loss; several losses are added up."""
        model = state.model
        mirror = self._session.mirror
        batch = state.batch if state.microbatch is None else state.microbatch
        return mirror.take_loss(model.loss(state.outputs, batch))  # type: ignore[operator]

    def end_batch(self, state: State) -> None:
        """Steps schedulers that count batches, before the timestamp advances; logs metrics."""
        theirs = self._session.mirror.theirs
        if self.parts.every_batch:
            for scheduler in theirs.schedulers:
                scheduler.step()
        self._metrics.end_batch()

    def end_epoch(self, state: State) -> None:
        """Steps schedulers that count epochs; logs metrics again."""
        self._metrics.end_batch()
        if not self.parts.every_batch:
            for scheduler in self._session.mirror.theirs.schedulers:
                scheduler.step()

    # Evaluation.

    @hookimpl
    def build_metrics(self, state: State, dataset: str) -> Mapping[str, Any]:
        """Returns the model's metrics for eval sets; training metrics are computed by `TrainMetrics`."""
        label = dataset.removeprefix("eval/")
        if dataset == "train":
            return {}
        return {**self._session.mirror.theirs.eval_metrics[label], "loss": None}

    @hookimpl
    def should_eval(self, state: State) -> bool:
        """Whether an eval set was due at the last call of `ask_evaluators`."""
        return self._is_due

    def ask_evaluators(self, state: State, event: str) -> bool:
        """Whether an eval set is due at an event; selects the due sets for the evaluation that follows."""
        theirs = self._session.mirror.theirs
        postponed = self._postponed
        due = [
            evaluator.label
            for evaluator in theirs.evaluators
            if evaluator.eval_interval(theirs, Event(event)) or evaluator.label in postponed
        ]
        # At most one evaluation per batch count: sets that are due at the last batch of an epoch
        # wait for the sets that may be due at the end of the epoch.
        is_last = state.clock.batch_in_epoch == (self.num_batches or state.num_batches)
        waits = event == "batch_end" and is_last and len(due) < len(theirs.evaluators)
        self._postponed = due if waits else []
        if due and not waits:
            state.eval_sets = due
        self._is_due = bool(due) and not waits
        return self._is_due

    @hookimpl(wrapper=True)
    def eval_batches(self, state: State, dataloader: Any) -> Generator[None, Iterable[Any], Any]:
        """Limits an eval set to its number of batches."""
        batches = yield
        length = None if state.eval_name is None else self.eval_length(state.eval_name)
        return batches if length is None else itertools.islice(batches, length)

    @hookimpl(tryfirst=True)
    def eval_batch_start(self, state: State) -> None:
        """Transforms the batch."""
        state.batch = self._data(state).batch_transforms(state.batch)

    @hookimpl(tryfirst=True)
    def eval_before_forward(self, state: State) -> None:
        """Transforms the batch again, as Composer does with microbatches."""
        state.batch = self._data(state).microbatch_transforms(state.batch)

    @hookimpl
    def eval_forward(self, state: State) -> Any:
        """Calls the model's own `eval_forward`."""
        return state.model.eval_forward(state.batch)  # type: ignore[operator]

    @hookimpl
    def update_metrics(self, state: State, metrics: Mapping[str, Any]) -> bool:
        """Lets the model update its metrics."""
        theirs = self._session.mirror.theirs
        model = state.model
        for metric in metrics.values():
            metric_outputs = model.update_metric(state.batch, state.outputs, metric)  # type: ignore[operator]
            theirs.metric_outputs = metric_outputs or {}
        return True

    def end_eval(self, state: State) -> None:
        """Shows the results in Composer's State, and logs them to its loggers."""
        mirror = self._session.mirror
        label = state.eval_name
        assert label is not None
        # eventloop's metrics also include numbers that callbacks logged.
        results = {
            name: state.eval_metrics[label][name] for name in mirror.theirs.eval_metrics[label]
        }
        mirror.theirs.eval_metric_values.update(results)
        mirror.logs.log({f"metrics/{label}/{name}": value for name, value in results.items()})

    # State in checkpoints.

    def saved(self) -> dict[str, Any]:
        """Returns the states of the schedulers."""
        return {"schedulers": [encoded(_plain(scheduler)) for scheduler in self._schedulers()]}

    def put_saved(self, saved: Mapping[str, Any]) -> None:
        """Restores the schedulers from the result of `saved`."""
        for scheduler, state in zip(self._schedulers(), saved["schedulers"], strict=True):
            scheduler.load_state_dict(decoded(state))

    def _schedulers(self) -> Sequence[LRScheduler]:
        schedulers: Sequence[LRScheduler] = self._session.mirror.theirs.schedulers
        return schedulers

    def _data(self, state: State) -> DataSpec:
        if state.eval_name is not None:
            return self._evaluator(state.eval_name).dataloader
        return self.parts.data or DataSpec([])

    def _evaluator(self, label: str) -> Evaluator:
        return next(evaluator for evaluator in self.parts.evaluators if evaluator.label == label)


def _plain(scheduler: LRScheduler) -> dict[str, Any]:
    """Returns a scheduler's state without functions, which a resumed run creates again."""
    return {name: value for name, value in scheduler.state_dict().items() if not callable(value)}


def model_of(module: nn.Module) -> ComposerModel:
    """Returns the ComposerModel without the wrapper of torch.compile."""
    inner = getattr(module, "_orig_mod", module)
    if not isinstance(inner, ComposerModel):
        raise TaskError(
            f"the model is {type(inner).__name__}, not a ComposerModel",
            fix="derive it from composer.models.ComposerModel, or train it as a Task of eventloop",
        )
    return inner
