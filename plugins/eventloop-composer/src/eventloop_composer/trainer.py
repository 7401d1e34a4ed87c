"""Composer's Trainer: its arguments and its methods, run by eventloop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eventloop_composer.importing import import_composer

import_composer()

from composer.callbacks import CheckpointSaver  # noqa: E402
from composer.core import Engine  # noqa: E402
from composer.core import State as ComposerState  # noqa: E402
from composer.core import Time as ComposerTime  # noqa: E402
from composer.core.data_spec import ensure_data_spec  # noqa: E402
from composer.core.time import TimeUnit, ensure_time  # noqa: E402
from composer.loggers import Logger  # noqa: E402
from composer.utils import checkpoint, ensure_tuple  # noqa: E402

import eventloop  # noqa: E402
from eventloop import SettingError, TaskError  # noqa: E402
from eventloop_composer.arguments import saver_of, scaled, time_of  # noqa: E402
from eventloop_composer.building import (  # noqa: E402
    built,
    data_of,
    evaluators_of,
    length_of,
    moves_every_batch,
)
from eventloop_composer.times import until  # noqa: E402


class Trainer:
    """Trains a model of Composer, as a replacement of `composer.Trainer`.

    Args:
        plugins: algorithms of eventloop to use; installed algorithms stay off.
        settings: eventloop's settings, which override the settings that arguments correspond to.
        arguments: arguments of Composer's trainer; arguments that can't be honoured are errors.

    Raises:
        TypeError: Composer's trainer has no such argument.
        SettingError: an argument can't be honoured.

    Attributes:
        eventloop: eventloop's trainer.
    """

    def __init__(
        self,
        *,
        plugins: Sequence[object] = (),
        settings: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        task, self._model_task, self._plugin = built(**arguments)
        savers = [
            callback
            for callback in self._plugin.session.callbacks
            if isinstance(callback, CheckpointSaver)
        ]
        self._checkpoint_saver = savers[0] if savers else saver_of(arguments)
        self._load = (
            arguments.get("load_path") if arguments.get("load_weights_only", False) else None
        )
        self._model_task.way_in = "plugins=[...]"
        eventloop_settings = dict(settings or {})
        self.eventloop = eventloop.Trainer(task, algorithms=list(plugins), **eventloop_settings)
        if self._load is not None:
            self._load_weights(strict=arguments.get("load_strict_model_weights", True))

    @property
    def state(self) -> ComposerState:
        """Composer's State, kept in sync with eventloop's."""
        return self._plugin.mirror.theirs

    @property
    def logger(self) -> Logger:
        """Composer's Logger."""
        return self._plugin.mirror.logger

    @property
    def engine(self) -> Engine:
        """Composer's Engine."""
        return self._plugin.mirror.engine

    @property
    def saved_checkpoints(self) -> list[str]:
        """Paths of the run's checkpoints, oldest first; paths of Composer's own files, if it saves any."""
        if self._checkpoint_saver is not None and self._checkpoint_saver in self.state.callbacks:
            return list(self._checkpoint_saver.saved_checkpoints)
        folder = self.eventloop.state.run_dir / "checkpoints"
        return sorted(str(path) for path in folder.glob("*")) if folder.is_dir() else []

    def fit(
        self,
        *,
        train_dataloader: Any = None,
        train_dataloader_label: str = "train",
        train_subset_num_batches: int | None = None,
        spin_dataloaders: bool | None = None,
        duration: int | str | ComposerTime | None = None,
        reset_time: bool = False,
        schedulers: Any = None,
        scale_schedule_ratio: float = 1.0,
        step_schedulers_every_batch: bool | None = None,
        eval_dataloader: Any = None,
        eval_subset_num_batches: int = -1,
        eval_interval: Any = 1,
        device_train_microbatch_size: int | None = None,
        precision: Any = None,
    ) -> None:
        """Trains the model; arguments override the constructor's arguments.

        Raises:
            SettingError: an argument can't be honoured.
        """
        if precision is not None or spin_dataloaders is False:
            raise SettingError(
                "fit(precision=..., spin_dataloaders=False) can't be honoured",
                fix="give the precision to Trainer(...), and leave the other out",
            )
        self._take_data(train_dataloader, train_dataloader_label, train_subset_num_batches)
        if device_train_microbatch_size is not None:
            self.state.device_train_microbatch_size = device_train_microbatch_size
            self.eventloop.state.microbatch_size = device_train_microbatch_size
        if reset_time:
            self._restart()
        self._take_duration(duration, scale_schedule_ratio)
        if schedulers is not None:
            self._take_schedulers(schedulers, scale_schedule_ratio, step_schedulers_every_batch)
        if eval_dataloader is not None:
            self._take_evaluators(eval_dataloader, eval_interval, eval_subset_num_batches)
        self.eventloop.fit(until=until(self.state.max_duration, self._plugin.mirror.since))
        self._evaluate_after_fit()

    def eval(self, eval_dataloader: Any = None, subset_num_batches: int = -1) -> None:
        """Evaluates; results are in `state.eval_metrics`.

        Raises:
            TaskError: there is nothing to evaluate.
        """
        saved = list(self.state.evaluators)
        if eval_dataloader is not None:
            self._take_evaluators(eval_dataloader, "1ep", subset_num_batches)
        elif subset_num_batches != -1:
            for evaluator in saved:
                evaluator.subset_num_batches = subset_num_batches
        if not self.state.evaluators:
            raise TaskError(
                "there is no eval data loader",
                fix="give eval_dataloader to Trainer(...) or eval(...)",
            )
        self.eventloop.eval()
        if eval_dataloader is not None:
            self.state.evaluators = saved
            self._model_task.parts.evaluators = saved

    def predict(
        self, dataloader: Any, subset_num_batches: int = -1, *, return_outputs: bool = True
    ) -> list[Any]:
        """Returns the outputs for a data loader, on the host; [] if `return_outputs` is false."""
        data = data_of(dataloader)
        loader: Any = data.dataloader
        if subset_num_batches >= 0:
            loader = [batch for batch, _ in zip(loader, range(subset_num_batches), strict=False)]
        outputs = self.eventloop.predict(loader)
        return outputs if return_outputs else []

    def close(self) -> None:
        """Closes callbacks, loggers and plugins."""
        self.eventloop.close()

    def save_checkpoint(
        self, name: str = "ep{epoch}-ba{batch}-rank{rank}", *, weights_only: bool = False
    ) -> Any:
        """Writes a checkpoint in Composer's own format."""
        return checkpoint.save_checkpoint(self.state, filename=name, weights_only=weights_only)

    def save_checkpoint_to_save_folder(self) -> None:
        """Writes a checkpoint in Composer's own format into `save_folder`, named by `save_filename`.

        Raises:
            ValueError: there is no such folder.
        """
        if self._checkpoint_saver is None:
            raise ValueError(
                "save_checkpoint_to_save_folder needs save_folder, an argument of Trainer(...)"
            )
        # Private, but Composer's trainer calls it, too (Composer 0.32.1).
        self._checkpoint_saver._save_checkpoint(self.state, self.logger)

    def _restart(self) -> None:
        """Restarts Composer's time."""
        if number := self.eventloop.state.clock.batch_in_epoch:
            raise SettingError(
                f"reset_time=True can't be honoured after {number} batches of an epoch, which goes on",
                fix="fit to the end of an epoch first, or build another Trainer with the same model",
            )
        self._plugin.mirror.restart()

    def _take_data(self, loader: Any, label: str, num_batches: int | None) -> None:
        training_parts = self._model_task.parts
        state = self.eventloop.state
        if num_batches is not None:
            training_parts.num_batches = None if num_batches < 0 else num_batches
        if loader is not None:
            # The data loader isn't distributed over the ranks here: Composer's function refuses one that isn't.
            training_parts.data = ensure_data_spec(loader)
            training_parts.label = label
            state.train_dataloader = training_parts.data.dataloader
            state.num_batches = length_of(state.train_dataloader)
            size = getattr(training_parts.data.dataloader, "batch_size", None)
            self.state.device_train_microbatch_size = training_parts.microbatch_size or size
        if training_parts.data is None:
            raise TaskError(
                "there is no data to train on",
                fix="give train_dataloader to Trainer(...) or fit(...)",
            )
        self._plugin.show_data(state)

    def _take_duration(self, duration: Any, ratio: float) -> None:
        timestamp = self.state.timestamp
        if duration is not None:
            length = ensure_time(duration, "ep")
            self._plugin.mirror.set_duration(length + timestamp.get(length.unit))
        if self.state.max_duration is None:
            raise SettingError(
                "max_duration is not set",
                fix="give max_duration to Trainer(...), or fit(duration=...)",
            )
        if self.state.dataloader_len is None and self.state.max_duration.unit == TimeUnit.EPOCH:
            raise SettingError(
                f"max_duration cannot be specified in epochs, {self.state.max_duration.to_timestring()}, "
                "with a data loader that has no length: it may be endless",
                fix="give it in batches, samples or tokens, or give train_subset_num_batches",
            )
        if ratio != 1.0:
            length = scaled(time_of("duration", self.state.max_duration), ratio)
            self._plugin.mirror.set_duration(ComposerTime.from_timestring(str(length)))
        if self.state.max_duration <= timestamp.get(self.state.max_duration.unit):
            raise SettingError(
                f"max_duration, {self.state.max_duration.to_timestring()}, is done",
                fix="give fit(duration=...) to train longer",
            )

    def _take_schedulers(self, schedulers: Any, ratio: float, every_batch: bool | None) -> None:
        scheduler_list = ensure_tuple(schedulers)
        self._model_task.set_schedulers(scheduler_list, ratio)
        self._model_task.parts.every_batch = moves_every_batch(scheduler_list, every_batch)

    def _take_evaluators(self, eval_data: Any, interval: Any, num_batches: int) -> None:
        state = self.eventloop.state
        model: Any = state.model
        evaluators = evaluators_of(model, eval_data, interval, num_batches)
        self._model_task.take_evaluators(state, evaluators)
        state.eval_dataloaders = {
            evaluator.label: evaluator.dataloader.dataloader for evaluator in evaluators
        }
        state.eval_sets = list(state.eval_dataloaders)
        metrics = {
            f"eval/{label}": metrics_of_set
            for label, metrics_of_set in self.state.eval_metrics.items()
        }
        state.metrics = {"train": state.metrics["train"], **metrics}

    def _evaluate_after_fit(self) -> None:
        """Evaluates the sets that are due at the end of a fit, after FIT_END, as Composer's trainer does."""
        state = self.eventloop.state
        if not self._model_task.ask_evaluators(state, "fit_end"):
            return
        saved = state.eval_dataloaders
        state.eval_dataloaders = {name: saved[name] for name in state.eval_sets}
        self._plugin.session.in_fit = True
        try:
            self.eventloop.eval()
        finally:
            self._plugin.session.in_fit = False
            state.eval_dataloaders = saved

    def _load_weights(self, *, strict: bool) -> None:
        path = str(self._load)
        if not path.endswith(".pt"):
            self.eventloop.load_weights(Path(path), strict=strict)
            return
        checkpoint.load_checkpoint(
            path=path,
            state=self.state,
            logger=self.logger,
            load_weights_only=True,
            strict_model_weights=strict,
        )
