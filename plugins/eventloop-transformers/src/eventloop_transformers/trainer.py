"""The class that puts a trainer of Hugging Face on eventloop's loop."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import transformers
from transformers.trainer_utils import TrainOutput

from eventloop import SettingError
from eventloop import Trainer as Loop
from eventloop.devices import kind_of
from eventloop_transformers.log_lines import log_sizes
from eventloop_transformers.named import plugins_of, unnamed
from eventloop_transformers.refused import refuse_class, refuse_fit, refuse_plugins, refuse_settings
from eventloop_transformers.task import Fit, TrainerTask
from eventloop_transformers.update_batches import Resumed, Updates

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object

T = TypeVar("T", bound=type)


class OnEventloop(Base):
    """A trainer whose `train()` runs on eventloop's loop; a mixin in front of a trainer's class.

    Attributes:
        eventloop_plugins: the plugins of eventloop to use.
        eventloop_watchers: additional objects that only watch.
        eventloop_settings: eventloop's settings.
        eventloop: eventloop's trainer of the last `train()`; None before the first.
    """

    eventloop_plugins: Sequence[object] = ()
    eventloop_watchers: Sequence[object] = ()
    eventloop_settings: Mapping[str, Any] = {}
    eventloop: Loop | None = None
    _task: TrainerTask | None = None
    _is_inside = False

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Prepares as transformers' Trainer does, trains on eventloop's loop, and ends as it does."""
        settings = dict(self.eventloop_settings)
        refuse_settings(settings)
        refuse_fit(self, settings)
        self._close_last(settings)
        self.accelerator.free_memory()
        if args.auto_find_batch_size:
            self._update_auto_batch_size(batch_size)
        data = self.get_train_dataloader()
        initial_values = self.set_initial_training_values(args, data)
        num_epochs, num_updates, _, num_samples, _, steps_in_epoch, max_steps = initial_values
        first_epoch, num_over = self._init_training_state(
            max_steps, num_updates, num_epochs, resume_from_checkpoint, trial
        )
        model, data = self._prepare_for_training(max_steps, data, resume_from_checkpoint)
        resumed = Resumed(resume_from_checkpoint, first_epoch, num_over)
        log_sizes(self, model, initial_values, resumed)
        start_time = time.time()
        self._begin_counts(args.device)
        keeps_position = settings.get("run_dir") is not None
        updates = Updates(self, data, steps_in_epoch, resumed, keeps_position=keeps_position)
        fit = Fit(
            model, updates, num_epochs, first_epoch, steps_in_epoch, trial, ignore_keys_for_eval,
            start_time,
        )  # fmt: skip
        task = TrainerTask(self, fit)
        if first_epoch < num_epochs:
            self._run(task, max_steps, settings)
        else:
            task.begin()
        return self._finalize_training(trial, num_samples, start_time)

    def _begin_counts(self, device: torch.device) -> None:
        """Sets the counters of the trainer's methods, as its own loop does."""
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        self._initial_global_step = self._globalstep_last_logged = self.state.global_step
        self._tr_loss = torch.tensor(0.0, device=device)
        self._total_loss_scalar = 0.0

    def _run(self, task: TrainerTask, max_steps: int, settings: Mapping[str, Any]) -> None:
        """Trains on eventloop's loop."""
        args = self.args
        algorithms, callbacks = plugins_of(self.eventloop_plugins)
        callbacks += self.eventloop_watchers
        is_exact = torch.get_float32_matmul_precision() == "highest"
        tf32 = not is_exact and not kind_of(args.device).is_host
        loop_settings: dict[str, Any] = {
            "max_duration": f"{max(1, max_steps)}ba",
            "device": str(args.device),
            # Accelerate applies autocast to the model, and scales the loss for fp16.
            "precision": "tf32" if tf32 else "fp32",
            "seed": args.seed % 2**32,
            "seed_samples": False,
            # All ranks have the same number of updates: no batch must be repeated.
            "uneven": "drop",
            "eval_interval": None,
            "on_bad_loss": "ignore",
            "gc_interval": None,
            "autoload": False,
            **settings,
        }
        self._task = task
        self.eventloop = run = Loop(
            task, algorithms=algorithms, callbacks=callbacks, **loop_settings
        )
        try:
            refuse_plugins(run.state, self, run.assembly)
            self._announce(run)
            run.fit()
        finally:
            if not self._lends:
                run.close()

    def _announce(self, run: Loop) -> None:
        """Announces which installed algorithms stay off."""
        if self.is_world_process_zero() and (names := unnamed(run.plugins)):
            sys.stderr.write(f"eventloop: off, unless named in plugins=[...]: {', '.join(names)}\n")

    @property
    def _lends(self) -> bool:
        """Whether a plugin may provide other weights for evaluation."""
        run = self.eventloop
        return run is not None and any(plugin.role == "algorithm" for plugin in run.plugins)

    def _close_last(self, settings: Mapping[str, Any]) -> None:
        if self.eventloop is None:
            return
        self.eventloop.close()
        if settings.get("run_dir") is not None:
            raise SettingError(
                "this trainer has trained already, and a run_dir is for one run",
                fix="make another trainer, with another run_dir",
            )

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluates as the trainer does; with a plugin's weights, if it provides any."""
        evaluate: Callable[..., dict[str, float]] = super().evaluate
        if self._is_inside or not self._lends:
            return evaluate(*args, **kwargs)
        metrics: dict[str, float] = {}

        def inside() -> dict[str, float]:
            metrics.update(evaluate(*args, **kwargs))
            return metrics

        assert self.eventloop is not None
        assert self._task is not None
        self._task.evaluation = inside
        self._is_inside = True
        try:
            self.eventloop.eval()
        finally:
            self._is_inside = False
        return metrics

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Saves as the trainer does; a run with a run_dir also saves its own checkpoint."""
        super()._save_checkpoint(model, trial)
        if self._task is not None and self.eventloop_settings.get("run_dir") is not None:
            self._task.request_checkpoint()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs as the trainer does, and passes the numbers to plugins of eventloop."""
        super().log(logs, *args, **kwargs)
        if self._task is not None:
            self._task.log(self.state.log_history[-1])


def on_eventloop(
    trainer: T,
    *,
    plugins: Sequence[object] = (),
    watchers: Sequence[object] = (),
    **settings: Any,
) -> T:
    """Returns a class of a trainer whose `train()` runs on eventloop's loop.

    Args:
        trainer: `transformers.Trainer`, or a subclass of it.
        plugins: plugins of eventloop to use: objects, or names of installed plugins. An object may
            change the training unless its package declares that it only watches.
        watchers: objects that only watch, of classes that aren't installed as plugins.
        settings: of eventloop, by name: run_dir="runs/a", checkpoint_interval="100ba".

    Raises:
        TypeError: the class isn't a trainer, or has its own loop.
        SettingError: a setting can't be honoured.
    """
    refuse_class(trainer)
    refuse_settings(settings)
    bases = (trainer,) if issubclass(trainer, OnEventloop) else (OnEventloop, trainer)
    all_settings = {**getattr(trainer, "eventloop_settings", {}), **settings}
    named = (*getattr(trainer, "eventloop_plugins", ()), *plugins)
    watching = (*getattr(trainer, "eventloop_watchers", ()), *watchers)
    attributes = {
        "__doc__": trainer.__doc__,
        "__module__": trainer.__module__,
        "__qualname__": trainer.__qualname__,
        "eventloop_plugins": named,
        "eventloop_watchers": watching,
        "eventloop_settings": all_settings,
    }
    return type(trainer.__name__, bases, attributes)  # type: ignore[return-value]


class Trainer(OnEventloop, transformers.Trainer):
    """transformers' Trainer, on eventloop's loop."""
