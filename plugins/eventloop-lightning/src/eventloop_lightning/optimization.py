"""Optimization in a batch: automatic, through the loop's actions, and manual."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# Private: the forms of a training step's result (lightning 2.6.6).
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.loops.optimization.manual import ManualResult
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import LBFGS

from eventloop import PluginError, State
from eventloop_lightning.hook_calls import HookCalls

Closure = Callable[[], Tensor | None]
# Methods that the module may override; inherited ones are bypassed.
_OWN = (
    "optimizer_step",
    "configure_gradient_clipping",
    "backward",
    "optimizer_zero_grad",
)


class TrainingStep:
    """Calls the module's `training_step` as Lightning does.

    Args:
        trainer: the trainer with the module.
        calls: calls the module's methods.
    """

    def __init__(self, trainer: Any, calls: HookCalls) -> None:
        self._calls = calls
        step = trainer.lightning_module.training_step
        if is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
            raise PluginError(
                "training_step(dataloader_iter) takes batches itself, which only the loop does",
                fix="write training_step(self, batch, batch_idx)",
            )
        self._takes_idx = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        plugin = trainer.precision_plugin
        self._context = None if type(plugin) is Precision else plugin.train_step_context

    def arguments(self, batch: Any, batch_idx: int) -> tuple[Any, ...]:
        """Returns the arguments of the step."""
        return (batch, batch_idx) if self._takes_idx else (batch,)

    def __call__(self, batch: Any, batch_idx: int) -> Any:
        """Runs the step and returns its result."""
        if self._context is None:
            return self._calls.own("training_step", *self.arguments(batch, batch_idx))
        with self._context():
            return self._calls.own("training_step", *self.arguments(batch, batch_idx))


class Automatic:
    """Automatic optimization: `optimizer_step` around `training_step`, `backward` and the rest.

    The loop's own update runs inside the closure, so that its events, plugins, microbatches and ranks
    keep their places.

    Args:
        trainer: Lightning's trainer, whose loops hold the run's progress.
        calls: calls the hooks.
    """

    def __init__(self, trainer: Any, calls: HookCalls) -> None:
        self._trainer = trainer
        self._calls = calls
        self._module = trainer.lightning_module
        self._training_step = TrainingStep(trainer, calls)
        self._fit_loop = trainer.fit_loop
        self._epoch_loop = trainer.fit_loop.epoch_loop
        self._progress = self._epoch_loop.automatic_optimization.optim_progress.optimizer
        self._own = {name for name in _OWN if calls.is_own(name)}
        self._state: State
        self._optimizer: Any = None
        self._batch_idx = 0
        self._steps = self._has_passed = False
        self._loss: Tensor | None = None
        self._extra: Mapping[str, Any] = {}

    def train(self, state: State, *, accumulates: bool) -> None:
        """Trains on the current batch, and steps unless gradients are accumulated."""
        self._state = state
        self._has_passed = False
        self._batch_idx = self._epoch_loop.batch_idx
        wrapped = self._trainer.strategy._lightning_optimizers[0]
        self._optimizer = wrapped._optimizer
        if accumulates:
            self._pass()
            return
        self._progress.step.increment_ready()
        if "optimizer_step" in self._own:
            epoch = self._trainer.current_epoch
            self._calls.own("optimizer_step", epoch, self._batch_idx, wrapped, self._pass)
        else:
            self.step(wrapped, self._pass)
        if not self._has_passed:
            raise PluginError(
                "optimizer_step has not called the closure, so that nothing was computed",
                by=type(self._module).__name__,
                fix="call optimizer.step(closure=optimizer_closure), or optimizer_closure()",
            )
        self._progress.step.increment_completed()

    def output(self) -> dict[str, Any]:
        """Returns the outputs that are passed to `on_train_batch_end`."""
        loss = self._loss
        self._loss = None
        return {} if loss is None else {"loss": loss, **self._extra}

    def step(self, optimizer: Any, closure: Closure, **kwargs: Any) -> Any:
        """Steps on the gradients of the closure; implements `optimizer.step(closure)`."""
        if closure == self._pass and not kwargs:
            self._steps = True
            try:
                return self._pass()
            finally:
                self._steps = False
        # A closure around Lightning's own, or no closure: the step is separate from the loop's update.
        loss = closure()
        self._finish_gradients()
        self._optimizer.step(**kwargs)
        return loss

    def backward(self, state: State, loss: Tensor) -> bool:
        """Zeroes the gradients at the start of a step, and adds the gradients of the loss."""
        calls = self._calls
        if not state.microbatch_idx and self._is_first_of_step():
            self._zero_grad()
        calls.tell("on_before_backward", loss)
        if "backward" in self._own:
            calls.own("backward", loss)
        else:
            loss.backward()  # type: ignore[no-untyped-call]
        calls.tell("on_after_backward")
        return True

    def announce_step(self) -> None:
        """Calls `on_before_optimizer_step`, if the batch ends with a step."""
        if self._steps:
            self._announce_step()

    def clip(self) -> None:
        """Clips the gradients, if the batch ends with a step."""
        if self._steps:
            self._clip()

    def move(self, closure: Closure) -> bool:
        """Steps the optimizer, if the batch ends with a step."""
        if self._steps:
            if _may_evaluate_twice(optimizer := self._optimizer):
                optimizer.step(_FirstKnown(closure, self._state.loss, optimizer))
            else:
                optimizer.step()
        return self._steps

    def _pass(self) -> Tensor | None:
        """Runs the batch up to its gradients; inside of `step` also the step."""
        self._has_passed = True
        if self._fit_loop._skip_backward:
            self._compute(self._state)
        else:
            try:
                self._state.update(self._loss_of)
                return self._loss
            except _NoLossError:
                self._state.microbatch = None
                if self._is_first_of_step():
                    self._zero_grad()
        if self._steps:
            self._finish_gradients()
            self._optimizer.step()
        return self._loss

    def _loss_of(self, state: State) -> Tensor:
        """Returns the loss of the training step, for the loop's update."""
        loss = self._compute(state)
        if loss is None:
            raise _NoLossError
        return loss.reshape(()) if loss.ndim else loss

    def _compute(self, state: State) -> Tensor | None:
        """Runs the training step; stores the outputs for `on_train_batch_end`."""
        batch = state.batch if state.microbatch is None else state.microbatch
        step_output = self._training_step(batch, self._batch_idx)
        num = self._trainer.accumulate_grad_batches
        if isinstance(step_output, Tensor):
            loss: Tensor | None = step_output / num if num > 1 else step_output
            self._extra = {}
        else:
            result = ClosureResult.from_training_step_output(step_output, num)
            loss = result.closure_loss
            self._extra = result.extra
        self._loss = None if loss is None else loss.detach()
        return loss

    def _is_first_of_step(self) -> bool:
        return not self._batch_idx % self._trainer.accumulate_grad_batches

    def _zero_grad(self) -> None:
        progress = self._progress.zero_grad
        optimizer = self._optimizer
        progress.increment_ready()
        self._calls.tell("on_before_zero_grad", optimizer)
        progress.increment_started()
        if "optimizer_zero_grad" in self._own:
            epoch = self._trainer.current_epoch
            self._calls.own("optimizer_zero_grad", epoch, self._batch_idx, optimizer)
        else:
            optimizer.zero_grad()
        progress.increment_completed()

    def _finish_gradients(self) -> None:
        """Calls the hooks between the gradients and the step."""
        self._announce_step()
        self._clip()

    def _announce_step(self) -> None:
        self._calls.tell("on_before_optimizer_step", self._optimizer)

    def _clip(self) -> None:
        trainer = self._trainer
        if trainer.gradient_clip_val or "configure_gradient_clipping" in self._own:
            self._calls.own(
                "configure_gradient_clipping",
                self._optimizer,
                gradient_clip_val=trainer.gradient_clip_val,
                gradient_clip_algorithm=trainer.gradient_clip_algorithm,
            )


class Manual:
    """Manual optimization: the training step itself computes gradients and steps.

    Args:
        trainer: Lightning's trainer.
        calls: calls the hooks.
    """

    def __init__(self, trainer: Any, calls: HookCalls) -> None:
        self._trainer = trainer
        self._calls = calls
        self._loop = trainer.fit_loop.epoch_loop
        self._progress = self._loop.manual_optimization.optim_step_progress
        self._training_step = TrainingStep(trainer, calls)
        self._own_backward = calls.is_own("backward")
        self._known: Any = None
        self._output: dict[str, Any] = {}

    def train(self, state: State, *, accumulates: bool) -> None:
        """Trains on the current batch."""
        optimizers = self._trainer.strategy._lightning_optimizers
        if optimizers is not self._known:
            self._known = optimizers
            for optimizer in optimizers:
                optimizer._on_before_step = self._progress.increment_ready
                optimizer._on_after_step = self._progress.increment_completed
        step_output = self._training_step(state.batch, self._loop.batch_idx)
        self._output = ManualResult.from_training_step_output(step_output).asdict()
        loss = self._output.get("loss")
        if isinstance(loss, Tensor) and loss.numel() == 1:
            state.loss = loss.detach().reshape(())

    def output(self) -> dict[str, Any]:
        """Returns the outputs that are passed to `on_train_batch_end`."""
        output = self._output
        self._output = {}
        return output

    def step(self, optimizer: Any, closure: Closure, **kwargs: Any) -> Any:
        """Steps, after calling the closure and the hooks before a step."""

        def computed() -> Any:
            loss = closure()
            self._calls.tell("on_before_optimizer_step", optimizer)
            return loss

        if closure is do_nothing_closure and not isinstance(optimizer, LBFGS):
            self._calls.tell("on_before_optimizer_step", optimizer)
            return optimizer.step(**kwargs)
        return optimizer.step(closure=computed, **kwargs)

    def manual_backward(
        self, loss: Tensor, average: Callable[[], None], *args: Any, **kwargs: Any
    ) -> None:
        """Adds the gradients of a loss.

        Args:
            average: averages them over the ranks.
        """
        self._calls.tell("on_before_backward", loss)
        if self._own_backward:
            self._calls.own("backward", loss, *args, **kwargs)
        else:
            loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]
        average()
        self._calls.tell("on_after_backward")


class _NoLossError(Exception):
    """Raised when a training step returns None: the batch is skipped without a backward pass."""


def _may_evaluate_twice(optimizer: Any) -> bool:
    """Whether an optimizer may call its closure more than once, or not first; torch's, except LBFGS, don't."""
    step = type(optimizer).step
    return isinstance(optimizer, LBFGS) or not step.__module__.startswith("torch.optim.")


class _FirstKnown:
    """The closure of a step, whose first call returns the loss that is already computed.

    It computes again if a weight has changed since, as with an optimizer that looks ahead.

    Args:
        closure: computes the gradients again, and returns the loss.
        loss: the loss whose gradients are already computed.
        optimizer: the optimizer of the weights.
    """

    def __init__(self, closure: Closure, loss: Tensor | None, optimizer: Any) -> None:
        self._closure = closure
        self._loss = loss
        self._optimizer = optimizer
        self._versions = self._current_versions()

    def __call__(self) -> Tensor | None:
        loss = self._loss
        self._loss = None
        return (
            self._closure() if loss is None or self._current_versions() != self._versions else loss
        )

    def _current_versions(self) -> list[int]:
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        return [param._version for param in params]
