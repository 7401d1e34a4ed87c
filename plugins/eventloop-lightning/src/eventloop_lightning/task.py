"""The task: a LightningModule on eventloop's loop, with its hooks at their places."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch import LightningModule

# Private: used by Lightning's trainer to prepare and call hooks (lightning 2.6.6).
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.trainer import call
from torch import Tensor, nn
from torch.optim import Optimizer

from eventloop import Count, PluginError, State, Time, Trainer, hookimpl, is_interruption
from eventloop.toolbox import announce_off
from eventloop_lightning import stages
from eventloop_lightning.batches import has_transfer, num_samples
from eventloop_lightning.checkpoint_state import Keeping
from eventloop_lightning.evaluation import computed_untrained, evaluated, predicted
from eventloop_lightning.hook_calls import HookCalls
from eventloop_lightning.lightning_checkpoints import ResumableFiles
from eventloop_lightning.optimization import Automatic, Manual
from eventloop_lightning.random_numbers import rng_states, set_rng_states
from eventloop_lightning.refused import refuse_plugins, refuse_settings
from eventloop_lightning.self_log_connector import BatchNumbers


class LightningTask:
    """Trains a LightningModule.

    Lightning's trainer exists for everything that modules, callbacks and loggers ask of it; its loops
    don't run, but hold the run's progress.

    Args:
        trainer: Lightning's trainer, with eventloop's strategy and fit loop.
        module: the module to train, or a function that builds it.
        attach: attaches the module and its data to the trainer; None if they are attached.
        generators: states of the random generators to set when training begins; None to keep
            eventloop's.
        leave_out: see `Keeping`.
    """

    # Installed algorithms would change the results of existing Lightning code.
    default_settings: ClassVar = {"autoload": "callbacks"}
    loss_may_broadcast = True  # torch warns about broadcasting, as under Lightning's trainer

    def __init__(
        self,
        trainer: Any,
        module: LightningModule | Callable[[], LightningModule],
        attach: Callable[[LightningModule, State], None] | None = None,
        generators: Mapping[str, Any] | None = None,
        leave_out: Collection[str] = (),
    ) -> None:
        self._trainer = trainer
        self._given = module
        self._attach = attach
        self._generators = generators
        self._fit_loop = trainer.fit_loop
        self._epoch_loop = trainer.fit_loop.epoch_loop
        self._progress = self._epoch_loop.batch_progress
        self._numbers = BatchNumbers(trainer)
        self._keeping = Keeping(trainer, leave_out)
        self._files = ResumableFiles(trainer, self._keeping)
        self._module: LightningModule
        self._calls: HookCalls
        self._optimization: Automatic | Manual
        self._lent: dict[str, Tensor] | None = None
        self._before_epoch: dict[str, Any] = {}
        self._modes: list[nn.Module] = []
        self._batch: Any = None
        self._in_batch = self._in_train_batch = self._is_unseen = False
        self._ends_epoch = self._accumulates = self._validates = False
        self._has_transfer = False
        self._epoch = 0
        self._count = Count(0, 0)

    # Building

    @hookimpl
    def build_model(self, state: State) -> nn.Module:
        """Sets the module up as Lightning does, up to `configure_model`."""
        if self._generators is not None:
            set_rng_states(self._generators)
        module_or_maker = self._given
        self._module = module = (
            module_or_maker if isinstance(module_or_maker, LightningModule) else module_or_maker()
        )
        if self._attach is not None:
            self._attach(module, state)
        refuse_settings(state, is_automatic=module.automatic_optimization)
        self._keeping.files.find(state)
        stages.set_up(self._trainer, module)
        self._calls = HookCalls(self._trainer)
        module.to(state.device)
        return module

    @hookimpl
    def build_optimizers(self, state: State) -> Mapping[str, Optimizer]:
        """Calls `configure_optimizers`, which may be in any of its forms."""
        self._trainer.strategy.setup(self._trainer)
        optimizers = self._trainer.optimizers
        if any(isinstance(optimizer, _MockOptimizer) for optimizer in optimizers):
            raise PluginError(
                "configure_optimizers returned None, and a run without an optimizer trains nothing",
                by=type(self._module).__name__,
                fix="return an optimizer, or evaluate with trainer.validate(model)",
            )
        if len(optimizers) == 1:
            return {type(optimizers[0]).__name__.lower(): optimizers[0]}
        shown = self._keeping.shown(optimizers)
        return {
            f"optimizer{idx}": optimizer for idx, optimizer in enumerate(optimizers) if idx in shown
        }

    @hookimpl
    def build_train_dataloader(self, state: State) -> Any:
        """Asks the module, the data module or the caller for the training data."""
        self._fit_loop.setup_data()
        if self._fit_loop.loader is None:
            return ()
        return self._fit_loop.loader

    @hookimpl
    def should_rebuild_dataloader(self, state: State) -> bool:
        """Answers by `reload_dataloaders_every_n_epochs`."""
        return bool(self._fit_loop._should_reload_train_dl)

    @hookimpl
    def build_schedulers(self, state: State) -> dict[str, Any]:
        """Returns no schedulers: Lightning's have their own intervals and monitors."""
        if self._generators is not None:
            self._generators = rng_states()
        return {}

    # Resuming from a checkpoint

    @hookimpl
    def before_load(self, state: State) -> None:
        """Defers loading weights and optimizers until the rest of the state is loaded."""
        self._keeping.is_loading = True

    @hookimpl
    def restore_model(self, state: State, weights: Mapping[str, Tensor], strict: bool) -> bool:
        """Loads the weights; when resuming, not before the module's `on_load_checkpoint`."""
        if self._keeping.is_loading:
            self._keeping.keep_weights(weights)
        else:
            state.model.load_state_dict(weights, strict=strict)
        return True

    @hookimpl
    def restore_optimizers(self, state: State, states: Mapping[str, dict[str, Any]]) -> bool:
        """Stores the states for `on_fit_start`, in which callbacks may recreate their parameter groups."""
        self._keeping.keep_optimizers(states)
        return True

    @hookimpl
    def after_load(self, state: State) -> None:
        """Restores module and callbacks; records the modules that are in evaluation mode."""
        of_command = ", or named with -p" if self._attach is not None else ""
        announce_off(state, "algorithms=[...]" + of_command)
        refuse_plugins(state, self._trainer)
        self._keeping.put_modules()
        self._modes = [submodule for submodule in state.model.modules() if not submodule.training]
        if self._generators is not None:
            set_rng_states(self._generators)

    def state_dict(self) -> dict[str, Any]:
        """Returns Lightning's checkpoint without weights and optimizers, plus the state that it lacks."""
        return {**self._keeping.take(), "ends_epoch": self._ends_epoch}

    def load_state_dict(self, state: dict[str, Any], version: str) -> None:
        """Stores the state until everything is built."""
        self._ends_epoch = state["ends_epoch"]
        self._keeping.keep(state)

    # The fit

    @hookimpl
    def training_start(self, state: State) -> None:
        """Calls Lightning's hooks before its first epoch, from `on_fit_start` on."""
        for submodule in self._modes:
            submodule.training = False
        trainer = self._trainer
        calls = self._calls
        if state.settings.run_dir is not None:
            self._keeping.require_savable()
        self._keeping.put_files()
        trainer.strategy.files = self._files
        trainer._logger_connector.state = state
        stages.begin(trainer, self._keeping)
        self._has_transfer = has_transfer(trainer)
        kind = Automatic if self._module.automatic_optimization else Manual
        self._optimization = kind(trainer, calls)
        trainer.strategy.step = self._optimization.step
        if isinstance(self._optimization, Manual):
            trainer.strategy.manual_backward = self._optimization.manual_backward

    @hookimpl(wrapper=True)
    def fit_start(self, state: State) -> Generator[None, None, None]:
        """Follows a callback's change of `max_epochs`, then writes the files that callbacks requested."""
        if not state.resumed and stages.is_done(self._trainer):
            state.request_stop("Lightning's trainer was stopped before the first batch")
            self._fit_loop.draw_seeds()
        epochs = self._fit_loop.max_epochs - self._fit_loop.first[0]
        length = state.duration
        if length is not None and length.unit == "ep" and state.until == length:
            state.until = Time(max(epochs, length.value), "ep")
        yield
        self._files.complete(state)

    @hookimpl
    def epoch_start(self, state: State) -> None:
        """Calls `on_train_epoch_start`, unless the epoch is resumed."""
        self._calls.refresh()
        self._epoch = state.clock.epoch
        if state.resumed:
            self._keeping.put_epoch()
            return
        self._ends_epoch = False
        progress = self._fit_loop.epoch_progress
        progress.increment_ready()
        self._calls.tell("on_train_epoch_start")
        progress.increment_started()
        stages.begin_epoch(self._epoch_loop)
        self._is_unseen = stages.is_done(self._trainer)
        if self._is_unseen:
            self._before_epoch = rng_states()

    @hookimpl
    def count_batch(self, state: State, batch: Any) -> Count:
        """Counts the samples of the first tensor that is found."""
        num = num_samples(batch)
        if self._count.samples != num:
            self._count = Count(num, 0)
        return self._count

    @hookimpl
    def after_dataloader(self, state: State) -> None:
        """Converts and moves a batch as Lightning does, where it isn't only moved."""
        if self._has_transfer and not self._is_unseen:
            state.batch = self._transferred(state.batch)

    @hookimpl
    def batch_start(self, state: State) -> None:
        """Calls `on_train_batch_start`, whose -1 ends the epoch."""
        progress = self._progress
        batch = state.batch
        if self._is_unseen:  # stopped at the start of the epoch: Lightning takes no batch
            self._ends_epoch = True
            set_rng_states(self._before_epoch)
            if not self._epoch:
                self._fit_loop.draw_seeds()
            return
        progress.increment_ready()
        progress.is_last_batch = self._is_last(progress.current.ready)
        self._numbers.begin(batch)
        self._batch = batch
        self._in_batch = True
        if self._calls.tell("on_train_batch_start", batch, progress.current.ready - 1) == -1:
            self._ends_epoch = progress.is_last_batch = True
        else:
            progress.increment_started()

    @hookimpl
    def should_skip_batch(self, state: State) -> bool:
        """Whether the epoch ends without this batch, as when `on_train_batch_start` returned -1."""
        return self._ends_epoch

    @hookimpl
    def train_batch(self, state: State) -> bool:
        """Trains on the batch; returns False while gradients are accumulated."""
        self._accumulates = self._epoch_loop._should_accumulate()
        self._in_train_batch = True
        try:
            self._optimization.train(state, accumulates=self._accumulates)
        finally:
            self._in_train_batch = False
        return not self._accumulates

    @hookimpl
    def forward(self, state: State) -> Any:
        """Runs the training step, for passes of plugins outside of the training, such as swa's."""
        # The loop's batches are transferred already; a plugin's pass loads its own batches.
        is_raw = has_transfer(self._trainer) and not self._in_batch
        batch = self._transferred(state.batch) if is_raw else state.batch
        return computed_untrained(self._trainer, self._calls, batch)

    @hookimpl
    def backward(self, state: State, loss: Tensor) -> bool:
        """Runs `backward` with the hooks around it."""
        return self._automatic.backward(state, loss)

    @hookimpl(wrapper=True, specname="clip_gradients")
    def before_clipping(
        self, state: State
    ) -> Generator[None, dict[str, Tensor], dict[str, Tensor]]:
        """Calls `on_before_optimizer_step`, also where a plugin clips."""
        self._automatic.announce_step()
        return (yield)

    @hookimpl
    def clip_gradients(
        self, state: State, optimizers: Mapping[str, Optimizer]
    ) -> dict[str, Tensor]:
        """Calls `configure_gradient_clipping`."""
        self._automatic.clip()
        return {}

    @hookimpl
    def optimizer_step(
        self,
        state: State,
        optimizers: Mapping[str, Optimizer],
        closure: Callable[[], Tensor],
    ) -> bool:
        """Steps, unless gradients are accumulated."""
        return self._automatic.move(closure)

    @hookimpl
    def zero_grad(self, state: State, optimizers: Mapping[str, Optimizer]) -> bool:
        """Skips zeroing: `backward` zeroes gradients at the moments when Lightning does."""
        if not self._in_train_batch:
            self._module.zero_grad()
        return True

    @hookimpl(wrapper=True)
    def batch_end(self, state: State) -> Generator[None, None, None]:
        """Steps the schedulers and ends the batch as Lightning does, after all other plugins."""
        yield
        if self._is_unseen:
            return
        loop = self._epoch_loop
        is_skipped = self._ends_epoch
        self._in_batch = False
        if is_skipped or not self._accumulates:
            stages.move_schedulers(loop, of_step=not is_skipped)
        self._progress.increment_processed()
        if is_skipped:
            self._batch = None
        else:
            self._end_batch()
        self._validates = not is_skipped and stages.is_validation_due(loop)

    @hookimpl
    def scheduler_step(self, state: State, interval: str) -> bool:
        """Leaves the schedulers to `batch_end`, which also follows a batch without a step."""
        return True

    @hookimpl
    def should_eval(self, state: State) -> bool:
        """Whether the validation interval is reached, also after the last batch of an epoch."""
        return self._validates

    @hookimpl
    def evaluate(self, state: State) -> dict[str, dict[str, Tensor]]:
        """Validates with Lightning's own loop, also outside of a fit."""
        metrics = evaluated(self._trainer, self._calls)
        if self._trainer.training:
            self._files.keep_validated(state)
        state.eval_metrics |= metrics
        return metrics

    @hookimpl
    def predict(self, state: State, dataloader: Any) -> list[Any]:
        """Predicts with Lightning's own loop."""
        return predicted(self._trainer, dataloader)

    @hookimpl
    def batch_checkpoint(self, state: State) -> None:
        """Steps the schedulers that monitor a metric, at the very end of the batch."""
        if not self._ends_epoch:
            stages.end_advance(self._epoch_loop, accumulates=self._accumulates)
        self._files.complete(state)

    @hookimpl
    def epoch_checkpoint(self, state: State) -> None:
        """Writes the files that `ModelCheckpoint` has requested since."""
        self._files.complete(state)

    @hookimpl
    def should_end_epoch(self, state: State) -> bool:
        """Whether all batches of the epoch are done, or the epoch was ended early."""
        return self._ends_epoch or self._progress.current.ready >= self._fit_loop.num_batches

    @hookimpl
    def should_stop(self, state: State) -> bool:
        """Answers by `max_steps` and `trainer.should_stop`."""
        return stages.is_done(self._trainer)

    @hookimpl
    def epoch_end(self, state: State) -> None:
        """Calls `on_train_epoch_end`, unless the epoch was interrupted."""
        is_complete = state.clock.epoch != self._epoch
        is_stopped = state.stop_reason is not None and not is_interruption(state.stop_reason)
        if is_complete or is_stopped or stages.is_done(self._trainer):
            stages.end_epoch(self._trainer, self._calls)

    @hookimpl
    def training_end(self, state: State) -> None:
        """Calls Lightning's hooks after its last epoch, unless the run was interrupted."""
        self._files.complete(state)
        self._files.finish(state)
        if self._files.lend is not None and not is_interruption(state.stop_reason):
            self._trainer.averages = self._files.lend()
            self._module.load_state_dict(self._files.averages(state))
        self._trainer.strategy.release()
        self._trainer._logger_connector.state = None
        if not is_interruption(state.stop_reason):
            stages.finish(self._trainer)

    @hookimpl(conditional=True)
    def export(self, state: State, path: Path) -> Path | None:
        """Collects the evaluated weights for `lend`, instead of writing them."""
        if self._lent is None:
            return None
        self._lent.update(
            (name, tensor.clone()) for name, tensor in self._module.state_dict().items()
        )
        return path

    def lend(self, trainer: Trainer) -> None:
        """Makes files, and the module after the fit, use the weights that evaluation uses.

        Args:
            trainer: eventloop's trainer, possibly with a plugin that evaluates averaged weights.
        """

        def lent() -> dict[str, Tensor]:
            self._lent = {}
            try:
                trainer.export("averages.safetensors")  # it is not written
                return self._lent
            finally:
                self._lent = None

        wrappers = [
            implementation
            for implementation in trainer.assembly.implementations["evaluate"]
            if implementation.wrapper
        ]
        if any(implementation.plugin.role == "algorithm" for implementation in wrappers):
            self._files.lend = lent

    @hookimpl
    def exception(self, state: State, error: BaseException) -> None:
        """Calls `on_exception`, where Lightning's trainer doesn't see the error itself."""
        if self._trainer.strategy.files is self._files and state.world_size == 1:
            self._files.finish(state, has_failed=True)
        if self._attach is not None:
            call._interrupt(self._trainer, error)

    @property
    def _automatic(self) -> Automatic:
        assert isinstance(self._optimization, Automatic)
        return self._optimization

    def _transferred(self, batch: Any) -> Any:
        batch = self._trainer.precision_plugin.convert_input(batch)
        batch = self._module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self._trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    def _is_last(self, number: int) -> bool:
        loop = self._fit_loop
        return number == loop.num_batches or bool(getattr(loop.loader, "is_last", False))

    def _end_batch(self) -> None:
        batch = self._batch
        self._batch = None
        progress = self._progress
        numbers = self._numbers
        output = self._optimization.output()
        self._calls.tell("on_train_batch_end", output, batch, progress.current.ready - 1)
        numbers.end()
        progress.increment_completed()
        numbers.deliver()
