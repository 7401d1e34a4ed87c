"""What a batch does to the weights: automatic optimization by the loop's actions, and manual."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

# Private: what a training step's result becomes (lightning 2.6.6).
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from eventloop import PluginError, State, StepOutcome
from eventloop_lightning.hook_calls import HookCalls

Closure = Callable[[], Tensor | None]


class TrainingStep:
    """Calls the module's `training_step` as Lightning does.

    Args:
        trainer: whose module it is.
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
        plain: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._context = plain if type(plugin) is Precision else plugin.train_step_context

    def arguments(self, batch: Any, batch_idx: int) -> tuple[Any, ...]:
        """Returns what the step is called with."""
        return (batch, batch_idx) if self._takes_idx else (batch,)

    def __call__(self, batch: Any, batch_idx: int) -> Any:
        """Returns what the step returns."""
        with self._context():
            return self._calls.own("training_step", *self.arguments(batch, batch_idx))


class Automatic:
    """Automatic optimization: `optimizer_step` around `training_step`, `backward` and the rest.

    The loop's own update is made inside of the closure, so that its events, its plugins, its
    microbatches and ranks have their places.

    Args:
        trainer: Lightning's, whose loops know where the run is.
        calls: calls the hooks.

    Attributes:
        result: what the batch's training step gave.
    """

    def __init__(self, trainer: Any, calls: HookCalls) -> None:
        self._trainer = trainer
        self._calls = calls
        self._module = trainer.lightning_module
        self._training_step = TrainingStep(trainer, calls)
        self._fit_loop = trainer.fit_loop
        self._epoch_loop = trainer.fit_loop.epoch_loop
        self._progress = self._epoch_loop.automatic_optimization.optim_progress.optimizer
        self._takes_own_step = calls.is_own("optimizer_step")
        self._clips_itself = calls.is_own("configure_gradient_clipping")
        self._own_backward = calls.is_own("backward")
        self._own_zero_grad = calls.is_own("optimizer_zero_grad")
        self._state: State
        self._steps = False
        self._outcome: bool | StepOutcome = False
        self._has_passed = False
        self.result = ClosureResult(None)

    def train(self, state: State) -> bool | StepOutcome:
        """Trains on the batch at hand; returns whether the optimizer has stepped."""
        self._state, self._has_passed = state, False
        self._outcome = False
        if self._fit_loop._should_accumulate():
            self._pass()
            return False
        self._progress.step.increment_ready()
        optimizer = self._trainer.strategy._lightning_optimizers[0]
        if self._takes_own_step:
            batch_idx = self._epoch_loop.batch_idx
            epoch = self._trainer.current_epoch
            self._calls.own("optimizer_step", epoch, batch_idx, optimizer, self._pass)
        else:
            self.step(optimizer, self._pass)
        if not self._has_passed:
            raise PluginError(
                "optimizer_step has not called the closure, so that nothing was computed",
                by=type(self._module).__name__,
                fix="call optimizer.step(closure=optimizer_closure), or optimizer_closure()",
            )
        self._progress.step.increment_completed()
        return self._outcome

    def output(self) -> dict[str, Any]:
        """Returns what `on_train_batch_end` is given."""
        result, self.result = self.result, ClosureResult(None)
        return {} if result.loss is None else result.asdict()

    def step(self, optimizer: Any, closure: Closure, **kwargs: Any) -> Any:
        """Makes a step with what the closure computes; what `optimizer.step(closure)` comes to."""
        if closure == self._pass and not kwargs:
            self._steps = True
            try:
                return self._pass()
            finally:
                self._steps = False
        # A closure around Lightning's own, or none: the step is made beside the loop's update.
        loss = closure()
        self._finish_gradients(optimizer)
        self._bare(optimizer).step(**kwargs)
        self._outcome = True
        return loss

    def backward(self, state: State, loss: Tensor) -> bool:
        """Empties the gradients where a step begins, and adds those of the loss."""
        calls, trainer = self._calls, self._trainer
        batch_idx = self._epoch_loop.batch_idx
        if not (state.microbatch_idx or batch_idx % trainer.accumulate_grad_batches):
            self._zero_grad(batch_idx)
        calls.tell("on_before_backward", loss)
        if self._own_backward:
            calls.own("backward", loss)
        else:
            loss.backward()  # type: ignore[no-untyped-call]
        calls.tell("on_after_backward")
        return True

    def clip(self) -> None:
        """Clips the gradients, if the batch ends with a step."""
        if self._steps:
            self._finish_gradients(self._trainer.optimizers[0])

    def move(self, optimizers: Mapping[str, Optimizer], closure: Closure) -> bool:
        """Has the optimizer move the weights, if the batch ends with a step."""
        if not self._steps:
            return False
        (optimizer,) = optimizers.values()
        if isinstance(optimizer, LBFGS):
            optimizer.step(_FirstKnown(closure, self._state.loss))  # type: ignore[no-untyped-call]
        else:
            optimizer.step()
        self._outcome = True
        return True

    def _pass(self) -> Tensor | None:
        """Runs the batch up to its gradients; and on to the step, inside of `step`."""
        self._has_passed = True
        if self._fit_loop._skip_backward:
            self._compute(self._state)
        else:
            try:
                self._state.update(self._loss)
            except _NoLossError:
                self._state.microbatch = None
                if not self._epoch_loop.batch_idx % self._trainer.accumulate_grad_batches:
                    self._zero_grad(self._epoch_loop.batch_idx)
            else:
                return self.result.loss
        if self._steps:
            optimizer = self._trainer.optimizers[0]
            self._finish_gradients(optimizer)
            optimizer.step()
            self._outcome = True
        return self.result.loss

    def _loss(self, state: State) -> Tensor:
        """Returns the loss of the training step."""
        result = self._compute(state)
        loss = result.closure_loss
        if loss is None:
            raise _NoLossError
        return loss.reshape(()) if loss.ndim else loss

    def _compute(self, state: State) -> ClosureResult:
        batch = state.batch if state.microbatch is None else state.microbatch
        given = self._training_step(batch, self._epoch_loop.batch_idx)
        num = self._trainer.accumulate_grad_batches
        self.result = ClosureResult.from_training_step_output(given, num)
        return self.result

    def _zero_grad(self, batch_idx: int) -> None:
        optimizer = self._trainer.optimizers[0]
        progress = self._progress.zero_grad
        progress.increment_ready()
        self._calls.tell("on_before_zero_grad", optimizer)
        progress.increment_started()
        if self._own_zero_grad:
            epoch = self._trainer.current_epoch
            self._calls.own("optimizer_zero_grad", epoch, batch_idx, optimizer)
        else:
            optimizer.zero_grad()
        progress.increment_completed()

    def _finish_gradients(self, optimizer: Any) -> None:
        """Does what comes between the gradients and the step."""
        optimizer = self._bare(optimizer)
        self._calls.tell("on_before_optimizer_step", optimizer)
        trainer = self._trainer
        if self._clips_itself or trainer.gradient_clip_val:
            self._calls.own(
                "configure_gradient_clipping",
                optimizer,
                gradient_clip_val=trainer.gradient_clip_val,
                gradient_clip_algorithm=trainer.gradient_clip_algorithm,
            )

    @staticmethod
    def _bare(optimizer: Any) -> Any:
        return getattr(optimizer, "_optimizer", optimizer)


class Manual:
    """Manual optimization: the training step steps by itself.

    Args:
        trainer: Lightning's.
        calls: calls the hooks.
    """

    def __init__(self, trainer: Any, calls: HookCalls) -> None:
        self._loop = trainer.fit_loop.epoch_loop
        self._training_step = TrainingStep(trainer, calls)
        self._output: dict[str, Any] = {}

    def train(self, state: State) -> bool:
        """Trains on the batch at hand."""
        names = ("batch", "batch_idx")
        given = self._training_step.arguments(state.batch, self._loop.batch_idx)
        self._output = self._loop.manual_optimization.run(dict(zip(names, given, strict=False)))
        loss = self._output.get("loss")
        if isinstance(loss, Tensor) and loss.numel() == 1:
            state.loss = loss.detach().reshape(())
        return True

    def output(self) -> dict[str, Any]:
        """Returns what `on_train_batch_end` is given."""
        output, self._output = self._output, {}
        return output


class _NoLossError(Exception):
    """A training step has returned None, which asks for a batch without a backward pass."""


class _FirstKnown:
    """The closure of a step, whose first call returns what is computed already."""

    def __init__(self, closure: Closure, loss: Tensor | None) -> None:
        self._closure, self._loss = closure, loss

    def __call__(self) -> Tensor | None:
        loss, self._loss = self._loss, None
        return self._closure() if loss is None else loss
