"""The trainer in the place of Lightning's: its arguments, its methods, eventloop's loop."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

import eventloop
from eventloop import Allowed, ResumeError, SettingError, hookimpl
from eventloop.toolbox import Checkpoint
from eventloop_lightning.accelerator import accelerator_for, take_device
from eventloop_lightning.fit_loop import FitLoop
from eventloop_lightning.lightning_checkpoints import checkpoint_in
from eventloop_lightning.random_numbers import rng_states
from eventloop_lightning.refused import checked_device, refuse_others_words
from eventloop_lightning.self_log_connector import Connector
from eventloop_lightning.self_log_results import Results
from eventloop_lightning.strategy import strategy_for
from eventloop_lightning.task import LightningTask

_OURS = ("devices", "num_nodes", "sync_batchnorm")
_ENDLESS = "1000000000ba"
_SAME = (
    "pass the same algorithms=[...], in the same versions, or begin another run: "
    'settings={"run_dir": ...}, another folder'
)


class NoProgress:
    """Replaces the installed progress plugin, and shows nothing."""

    name = "progress"
    shows_progress = True

    @hookimpl
    def fit_start(self) -> None:
        """Shows nothing; a plugin without a hook would be an error."""


class Trainer(LightningTrainer):
    """Lightning's Trainer, with eventloop's loop in `fit`.

    Args:
        settings: of eventloop, by name: {"run_dir": "runs/a", "checkpoint_interval": "1ep"}.
        algorithms: plugins of eventloop that may change the training; installed plugins stay off.
        watchers: plugins of eventloop that only watch.
        leave_out: keys that `on_save_checkpoint` adds and that the checkpoints of a run_dir leave out,
            such as objects; Lightning's own files have them.
        arguments: arguments of Lightning's Trainer.

    Attributes:
        averages: the weights that an algorithm evaluates at the end of the last fit, such as ema's
            average; None without such an algorithm. The module has the last validated ones.

    Raises:
        SettingError: an argument can't be honoured.
    """

    averages: dict[str, torch.Tensor] | None = None
    fit_loop: FitLoop

    def __init__(
        self,
        *,
        settings: Mapping[str, Any] | None = None,
        algorithms: Sequence[object] = (),
        watchers: Sequence[object] = (),
        leave_out: Sequence[str] = (),
        **arguments: Any,
    ) -> None:
        self.eventloop_settings = dict(settings or {})
        self._leave_out = tuple(leave_out)
        self._algorithms = algorithms
        self._watchers = list(watchers)
        is_silent = arguments.get("enable_progress_bar") is False
        names = [getattr(watcher, "name", None) for watcher in watchers]
        if is_silent and NoProgress.name not in names:
            self._watchers.append(NoProgress())
        device = checked_device(arguments)
        lightning_arguments = {key: value for key, value in arguments.items() if key not in _OURS}
        self._shares_batch_norms = bool(arguments.get("sync_batchnorm"))
        lightning_arguments["strategy"], lightning_arguments["devices"] = strategy_for(device), 1
        if not {device.type, lightning_arguments.get("accelerator")} & set(AcceleratorRegistry):
            lightning_arguments["accelerator"] = accelerator_for(device)
        super().__init__(**lightning_arguments)
        take_device(self.strategy, device)
        epoch_loop = self.fit_loop.epoch_loop
        self.fit_loop = FitLoop(self, self.fit_loop.min_epochs, self.fit_loop.max_epochs)
        self.fit_loop.epoch_loop = epoch_loop
        epoch_loop._results = Results(self.strategy.reduce)
        self._logger_connector = Connector(self)

    @property
    def training(self) -> bool:
        """Whether training is under way."""
        # Lightning's compares texts, and is asked some fifteen times a batch.
        return self.state.stage is RunningStage.TRAINING

    @training.setter
    def training(self, value: bool) -> None:
        if value:
            self.state.stage = RunningStage.TRAINING
        elif self.training:
            self.state.stage = None

    def _run(
        self, model: LightningModule, ckpt_path: Any = None, weights_only: bool | None = None
    ) -> Any:
        """Runs a fit on eventloop's loop; validation, test and prediction on Lightning's own.

        So does a fit without a batch, in which no loop has anything to do.
        """
        limits = self.limit_train_batches, self.max_steps, self.max_epochs
        has_fitted = self.fit_loop.epoch_progress.total.ready > 0
        self.fit_loop.has_steps = 0 not in limits and not (has_fitted and self.fit_loop.done)
        if self.state.fn != TrainerFn.FITTING or not self.fit_loop.has_steps:
            return super()._run(model, ckpt_path, weights_only)
        self._refuse_for_fit()
        refuse_others_words(self.eventloop_settings)
        self.strategy.seed()
        generators = rng_states()
        task = LightningTask(self, model, generators=generators, leave_out=self._leave_out)
        loop = self.fit_loop
        resumed = None if ckpt_path is None else checkpoint_in(self, ckpt_path, weights_only)
        loop.first = loop.epoch_progress.current.processed, self.global_step
        if resumed is not None:
            loop.first = tuple(resumed.parts["plugins"]["task"]["state"]["first"])
        settings = {**self._settings(model), **self.eventloop_settings}
        # A run may resume with other arguments, such as more epochs, as under Lightning.
        allowed = Allowed(config_change=True)
        anomalies = (
            torch.autograd.set_detect_anomaly(True) if self._detect_anomaly else nullcontext()
        )
        with (
            anomalies,
            _in_own_words(),
            eventloop.TrainerBuilder(allowed=allowed, checkpoint=resumed).build(
                task, algorithms=self._algorithms, callbacks=self._watchers, **settings
            ) as trainer,
        ):
            _require_algorithms(trainer, resumed)
            task.lend(trainer)
            trainer.fit()
        return None

    def _settings(self, model: LightningModule) -> dict[str, Any]:
        """Returns the eventloop settings that correspond to the arguments."""
        return {
            "max_duration": self._duration(model),
            "device": str(self.strategy.root_device),
            # Lightning's plugin does the autocast, in manual optimization and validation, too.
            "precision": "fp32",
            "seed_samples": False,
            "eval_interval": None,
            "on_bad_loss": "ignore",
            "gc_interval": None,
            "sync_batch_norm": self._shares_batch_norms,
        }

    def _duration(self, model: LightningModule) -> str:
        epochs = self.fit_loop.max_epochs
        steps = self.max_steps
        past_epochs, past_steps = self.fit_loop.first
        if epochs is None and steps == -1:
            epochs = 1000
        if epochs is not None and epochs != -1:
            return f"{max(epochs - past_epochs, 1)}ep"
        if steps != -1 and model.automatic_optimization:
            return f"{(steps - past_steps) * self.accumulate_grad_batches}ba"
        return _ENDLESS

    def _refuse_for_fit(self) -> None:
        if self.fit_loop.epoch_progress.total.ready and "run_dir" in self.eventloop_settings:
            raise SettingError(
                "this Trainer has fitted already, and its run_dir holds that run",
                fix="make a new Trainer, with another run_dir or without one",
            )
        for callback in self.callbacks:
            if isinstance(callback, BatchSizeFinder | LearningRateFinder):
                raise SettingError(
                    f"{type(callback).__name__} runs fits inside of a fit, which the loop doesn't",
                    fix="set the batch size, or the learning rate, in the module; "
                    'settings={"microbatch_size": "auto"} fits a batch into the memory',
                )


def _require_algorithms(trainer: eventloop.Trainer, resumed: Checkpoint | None) -> None:
    """Refuses to resume without an algorithm that the run began with."""
    saved_plugins = [] if resumed is None else resumed.facts["manifest"]["plugins"]
    names = [plugin.name for plugin in trainer.plugins]
    for plugin in saved_plugins:
        if plugin["role"] == "algorithm" and plugin["name"] not in names:
            raise ResumeError(f"the run was begun with {plugin['name']}, which isn't here")


@contextmanager
def _in_own_words() -> Iterator[None]:
    """Re-raises a `ResumeError` with the fix that applies to this trainer."""
    try:
        yield
    except ResumeError as error:
        facts: Any = error.facts
        raise ResumeError(error.what, **facts, fix=_SAME) from None


def _signature() -> inspect.Signature:
    """Returns the trainer's signature, for command lines and editors: Lightning's arguments and ours."""
    theirs = inspect.signature(LightningTrainer.__init__)
    ours = inspect.signature(Trainer.__init__, eval_str=True).parameters.values()
    added = [parameter for parameter in ours if parameter.kind is parameter.KEYWORD_ONLY]
    return theirs.replace(parameters=[*theirs.parameters.values(), *added])


Trainer.__init__.__signature__ = _signature()  # type: ignore[attr-defined]
