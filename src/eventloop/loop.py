"""The loop. Every line that calls a hook is a line of the pseudo-code in the documentation.

`hooks.NAME(state)` fires an event, asks a question or calls an action. The methods marked with
`hookimpl` are the core's defaults for the actions of their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from eventloop.data import to_host
from eventloop.data.feed import NO_SAMPLES, Feeds
from eventloop.forms import as_dict, from_dict
from eventloop.hook_markers import hookimpl
from eventloop.plugin.plans import Plans
from eventloop.signals import StopReason, is_interruption
from eventloop.state import State
from eventloop.training.evaluation import TrainingMode, batches_of, evaluation_mode, results_of
from eventloop.training.interrupted_fit import (
    InterruptedFit,
    Stage,
    require_same_stage,
    warn_of_counts_twice,
    warn_of_lost_batch,
)
from eventloop.training.metrics import log_train_metrics
from eventloop.training.plugin_updates import (
    Accumulate,
    Passes,
    misplaced_update,
    named,
    no_microbatch,
    passes_of,
    require_gradients,
)
from eventloop.training.resume_point import LoopState, ResumePoint
from eventloop.training.stops import ANSWERED, warn_of_overridden_stop

if TYPE_CHECKING:
    from eventloop.clock import Time
    from eventloop.data.feed import Feed
    from eventloop.distributed.processes import Processes
    from eventloop.plugin.plans import ActivePlugins
    from eventloop.training.grad_scaling import StepOutcome
    from eventloop.training.logged_numbers import Numbers
    from eventloop.training.stops import Stopped


class Loop:
    """Runs the plans of one trainer over its State.

    Args:
        active: the active plugins and their plans, which are complete before the first call.
        move: copies a batch to the device.
        processes: the processes that train together.
        retry: wraps the function that computes the gradients of a batch, so that it can retry with
            smaller microbatches.
        numbers: logged numbers that loggers haven't received yet.
        best_weights: loads the weights of the best evaluation into the model for a `with` block.

    Attributes:
        feeds: the sources of training batches.
        resume_point: where the loop continues a resumed run.
        is_finished: whether the last fit was completed, in this process or before a resume.
    """

    __slots__ = (
        "_accumulate",
        "_active",
        "_best_weights",
        "_can_update",
        "_epoch_is_complete",
        "_evaluated_at",
        "_has_begun",
        "_in_training",
        "_interrupted",
        "_numbers",
        "_saved_at",
        "_stage",
        "_stepped",
        "_training_mode",
        "feeds",
        "hooks",
        "is_finished",
        "move",
        "processes",
        "quiet",
        "resume_point",
    )

    def __init__(
        self,
        active: ActivePlugins,
        move: Callable[[Any], Any],
        processes: Processes,
        retry: Callable[[Accumulate], Accumulate],
        numbers: Numbers,
        best_weights: Callable[[State], AbstractContextManager[None]],
    ) -> None:
        self._active = active
        self.hooks = active.plans
        self.quiet = active.quiet
        self.move = move
        self.processes = processes
        self._accumulate = retry(self._microbatches)
        self._numbers = numbers
        self._best_weights = best_weights
        self._has_begun = False
        self._can_update = False
        self.feeds = Feeds(self.hooks, processes)
        self.resume_point = ResumePoint(self.hooks)
        self.is_finished = True
        self._in_training = False
        self._training_mode = TrainingMode()
        self._evaluated_at = -1
        self._saved_at = -1
        # The progress within a batch or the end of an epoch. If a fit raises, the next one continues here.
        self._stage: Stage = "idle"
        self._stepped: bool | StepOutcome = False
        self._epoch_is_complete = False
        self._interrupted: InterruptedFit | None = None

    @property
    def was_interrupted(self) -> bool:
        """Whether the last fit raised an exception; the next fit continues there."""
        return self._interrupted is not None

    def fit(self, state: State, duration: Time | None, overridden: Stopped | None = None) -> None:
        """Trains until `state.until`, or until the run is stopped.

        If it raises, the next call continues from that point.

        Args:
            duration: the length of the whole run; this fit may be a part of it.
            overridden: why the run was stopped earlier, if this fit continues a stopped run.
        """
        try:
            self._fit(state, duration, overridden)
        except BaseException:
            self.is_finished = False
            # Otherwise this fit raised before it had continued an earlier one, which is still to be done.
            if self._interrupted is None:
                self._interrupted = self._interrupted_fit(state)
            raise

    def _fit(self, state: State, duration: Time | None, overridden: Stopped | None) -> None:
        hooks = self.hooks
        self.is_finished = False
        self._start_clean(state)
        self._training_mode.enter(state)
        if not self._in_training:
            hooks.training_start(state)
            self._in_training = True
        hooks.fit_start(state)
        if state.settings.eval_at_start and not state.clock.batch:
            self._evaluate_once(state)
        if hooks.should_checkpoint(state):
            self._save(state)

        self.processes.exchange.settle(state)
        if overridden is not None and state.stop_reason is None:
            warn_of_overridden_stop(state, overridden)
        self._continue_after_epoch(state)
        over = self.resume_point.between_epochs(state)
        while not over:
            over = self._epoch(state)
        self._stage = "ending"

        self.processes.exchange.settle(state)
        if not state.clock.reached(state.until):
            state.stop_reason = state.stop_reason or self._reason_of_answer(state)
        log_train_metrics(state)
        is_over = state.stop_reason is not None or duration is None or state.clock.reached(duration)
        if is_over and not is_interruption(state.stop_reason):
            self._evaluate_test_sets(state)
        self.is_finished = True
        if hooks.should_checkpoint(state):
            if not is_interruption(state.stop_reason):
                # Save again even if there is a checkpoint of this batch: only this one is of a finished run.
                self._saved_at = -1
            self.save_once(state)
        self.deliver_everything(state)
        self._training_mode.remember(state)
        hooks.fit_end(state)
        if is_over:
            self._in_training = False
            hooks.training_end(state)
        self._stage = "idle"

    def _reason_of_answer(self, state: State) -> StopReason:
        """Returns the reason of a stop that plugins caused by answering `should_stop` with True."""
        plugins = self._active.plugins_that_answer("should_stop", state)
        return StopReason(ANSWERED, "plugin", ", ".join(plugins) or None)

    def _epoch(self, state: State) -> bool:
        """Trains for one epoch or the rest of one; returns whether the fit is over."""
        hooks = self.hooks
        feed = self.feeds.of_epoch(state)
        state.resumed = feed.under_way
        hooks.epoch_start(state)
        if not state.resumed:
            feed.start_epoch(state.clock.epoch)
            state.num_batches = feed.num_batches
        state.even_batches = feed.is_even
        self._continue_batch(state, feed)

        end_epoch: bool | None
        over: bool | None
        end_epoch, over = self.resume_point.in_epoch(state)
        while not (over or end_epoch) and feed.has_next():
            self._batch(state, feed)
            self._after_batch(state)
            end_epoch = hooks.should_end_epoch(state)
            over = hooks.should_stop(state)

        # `should_end_epoch` completes an epoch just as the end of the data does.
        self._epoch_is_complete = bool(end_epoch or feed.has_ended())
        if self._epoch_is_complete:
            feed.end_epoch()
            state.clock.end_epoch()
        self._stage = "epoch counted"
        self._after_epoch(state)
        return bool(over or hooks.should_stop(state))

    def _after_epoch(self, state: State) -> None:
        """Runs the events after an epoch, or after the part of an epoch that a fit trained for."""
        hooks = self.hooks
        if self._stage == "epoch counted":
            hooks.epoch_end(state)
            self._stage = "epoch ended"
        if self._stage == "epoch ended":
            if self._epoch_is_complete:
                hooks.scheduler_step(state, "ep")
            self._stage = "epoch scheduled"
        if self._stage == "epoch scheduled":
            if hooks.should_eval(state):
                self._evaluate_once(state)
            hooks.epoch_checkpoint(state)
            self._stage = "epoch evaluated"
        if hooks.should_checkpoint(state):
            self._save(state)
        self._numbers.deliver(state, hooks)
        self._stage = "epoch done"

    def _batch(self, state: State, feed: Feed) -> None:
        """Fetches a batch, trains on it, and advances the clock."""
        hooks = self.hooks
        exchange = self.processes.exchange

        # Samples and tokens are counted on the host, before the copy to the device.
        hooks.before_dataloader(state)
        batch = feed.next()
        self._stage = "taken"
        count = hooks.count_batch(state, batch)
        state.count = NO_SAMPLES if feed.is_padding else count
        state.batch = self.move(batch)
        hooks.after_dataloader(state)

        hooks.batch_start(state)
        exchange.start(state)
        self._has_begun = False
        self._can_update = True
        self._stepped = False
        if not hooks.should_skip_batch(state):
            self._stepped = hooks.train_batch(state)
        self._has_begun = self._can_update = False
        self._stage = "trained"

        # The clock moves before `batch_end`, the learning rates after it.
        samples, tokens, seconds = exchange.end(state)
        state.clock.end_batch(samples, tokens, seconds)
        self._stage = "counted"

    def _after_batch(self, state: State) -> None:
        """Runs the events after a batch, once the clock has counted it."""
        hooks = self.hooks
        if self._stage == "counted":
            hooks.batch_end(state)
            state.batch = state.loss = None
            self._stage = "ended"
        if self._stage == "ended":
            # With fp16 it takes another batch to know, without waiting, whether the step was skipped.
            # Schedulers step only then.
            state.precision.once_stepped(self._stepped, hooks.scheduler_step, state)
            self._stage = "scheduled"
        if self._stage == "scheduled":
            if hooks.should_eval(state):
                self._evaluate_once(state)
            hooks.batch_checkpoint(state)
            self._stage = "evaluated"
        if hooks.should_checkpoint(state):
            self._save(state)
        self._numbers.deliver(state, hooks)
        self._stage = "batch done"

    @hookimpl
    def train_batch(self, state: State) -> bool | StepOutcome:
        """Trains on the current batch: the default of the action `train_batch`."""
        self._begin(state)
        return self._update(state, state.optimizers, self._accumulate, forward_and_loss)

    def _begin(self, state: State) -> None:
        """Calls `before_train_batch` once a batch, even if there are several updates."""
        self._can_update = False
        if not self._has_begun:
            self._has_begun = True
            self.hooks.before_train_batch(state)

    def _update(
        self,
        state: State,
        optimizers: Mapping[str, Optimizer],
        accumulate: Accumulate,
        passes: Passes,
        suffix: str = "",
    ) -> bool | StepOutcome:
        """Computes the gradients of the batch and steps these optimizers."""
        hooks = self.hooks
        state.loss = accumulate(state, hooks, optimizers, passes)
        numbers = hooks.clip_gradients(state, optimizers)
        for name, value in numbers.items():
            state.log(f"train/{name}{suffix}", value)
        hooks.after_train_batch(state)

        def closure() -> Tensor:
            return self._repeat(state, optimizers, accumulate, passes)

        stepped: bool | StepOutcome = False
        if not hooks.should_skip_step(state):
            self._stage = "stepping"
            stepped = hooks.optimizer_step(state, optimizers, closure)
        self._stage = "trained"
        self._stepped = stepped
        hooks.zero_grad(state, optimizers)
        self._can_update = True
        return stepped

    def _microbatches(
        self, state: State, hooks: Plans, optimizers: Mapping[str, Optimizer], passes: Passes
    ) -> Tensor:
        """Accumulates the gradients of a batch in `.grad`, microbatch by microbatch.

        Args:
            hooks: the plans, with or without the events of a microbatch.
            optimizers: the optimizers of the parameters that get gradients.
            passes: computes the loss of a microbatch.

        Returns:
            The mean loss of the batch, shape (), detached.
        """
        microbatches = hooks.split_batch(state)
        if not microbatches:
            raise no_microbatch(state)
        state.num_microbatches = len(microbatches)
        weights = self.processes.loss_weights(state, microbatches, hooks.weigh_microbatch)
        self._numbers.weights = weights.each

        mean_loss: Tensor | None = None
        for idx, microbatch in enumerate(microbatches):
            state.microbatch = microbatch
            state.microbatch_idx = idx
            passes(state, hooks)
            assert state.loss is not None

            # The weights make the sum of the gradients equal to the gradient of the undivided batch.
            hooks.before_backward(state)
            loss = weights.scaled(state.loss, idx)
            hooks.backward(state, loss)
            hooks.after_backward(state)

            loss = loss.detach()
            mean_loss = loss if mean_loss is None else mean_loss + loss
            state.microbatch = state.outputs = state.loss = None
        assert mean_loss is not None
        return mean_loss

    def _repeat(
        self,
        state: State,
        optimizers: Mapping[str, Optimizer],
        accumulate: Accumulate,
        passes: Passes,
    ) -> Tensor:
        """Computes the gradients of the batch again, without events: the closure for `optimizer.step`."""
        last_loss = state.loss
        self.hooks.zero_grad(state, optimizers)
        with torch.enable_grad(), self._numbers.unheard():
            loss = accumulate(state, self.quiet, optimizers, passes)
            self.hooks.clip_gradients(state, optimizers)
        state.loss = last_loss
        # Optimizers with a line search decide by the loss, and must decide alike on all ranks.
        return self.processes.mean(loss)

    def update(
        self, state: State, loss_fn: Callable[[State], Tensor], names: Iterable[str]
    ) -> bool | StepOutcome:
        """Updates the weights of some of the optimizers: see `State.update`."""
        if not self._can_update:
            raise misplaced_update()
        optimizers = named(state.optimizers, names, self._active)
        own_passes = passes_of(state.precision.under_autocast(loss_fn))

        def accumulate(
            state: State, hooks: Plans, optimizers: Mapping[str, Optimizer], passes: Passes
        ) -> Tensor:
            loss = self._accumulate(state, hooks, optimizers, passes)
            self.processes.average(state, optimizers)
            require_gradients(optimizers)
            return loss

        self._begin(state)
        suffix = f".{'.'.join(optimizers)}"
        self._numbers.next_update()
        stepped = self._update(state, optimizers, accumulate, own_passes, suffix)
        self._stage = "stepping"  # the batch may get further updates
        self._numbers.next_update()
        assert state.loss is not None
        self._numbers.record_part(f"train/loss{suffix}", state.loss, 0, "mean")
        # The passes may have computed gradients for parameters of other optimizers, too.
        self.hooks.zero_grad(state, state.optimizers)
        return stepped

    @hookimpl
    def evaluate(self, state: State) -> dict[str, dict[str, Tensor]]:
        """Evaluates over all eval data loaders: the default of the action `evaluate`."""
        hooks = self.hooks
        of_set = self._numbers.of_set
        with evaluation_mode(state, logs=True):
            hooks.eval_before_all(state)
            for name in state.eval_sets:
                state.eval_name = name
                dataloader = state.eval_dataloaders[name]
                metrics = state.metrics[f"eval/{name}"]
                for metric in metrics.values():
                    metric.reset()
                hooks.eval_start(state)
                batches = hooks.eval_batches(state, dataloader)
                loaded = batches_of(batches, f"eval data loader {name!r}")
                for state.eval_batch_idx, batch in enumerate(loaded):
                    state.batch = self.move(batch)
                    hooks.eval_batch_start(state)
                    hooks.eval_before_forward(state)
                    state.outputs = hooks.eval_forward(state)
                    hooks.eval_after_forward(state)
                    hooks.update_metrics(state, metrics)
                    hooks.eval_batch_end(state)
                    state.batch = state.outputs = None
                logged = of_set.take(self.processes, state.device)
                state.eval_metrics[name] = results_of(metrics, logged)
                hooks.eval_end(state)
            state.eval_name = None
            hooks.eval_after_all(state)
        return state.eval_metrics

    @hookimpl
    def predict(self, state: State, dataloader: Any) -> list[Any]:
        """Collects the outputs for a data loader: the default of the action `predict`."""
        hooks = self.hooks
        results = []
        with evaluation_mode(state):
            hooks.predict_start(state)
            batches = hooks.eval_batches(state, dataloader)
            for batch in batches_of(batches, "data loader to predict for"):
                state.batch = self.move(batch)
                hooks.predict_batch_start(state)
                hooks.predict_before_forward(state)
                state.outputs = hooks.predict_forward(state)
                hooks.predict_after_forward(state)
                hooks.predict_batch_end(state)
                results.append(to_host(state.outputs))
                state.batch = state.outputs = None
            hooks.predict_end(state)
        return results

    @hookimpl
    def close(self) -> None:
        """Releases the train data loader, whose workers may persist between epochs."""
        self.feeds.give_up()

    def deliver_everything(self, state: State, *, alone: bool = False) -> None:
        """Delivers all logged numbers to loggers; waits for the device.

        Args:
            alone: don't communicate with other ranks, which may have ended. Numbers of an unfinished
                batch are dropped: they would be attributed to the previous batch.
        """
        if alone and self.feeds.are_ahead_of(state.clock):
            self._numbers.forget()
        self._numbers.deliver_all(state, self.hooks, alone=alone)

    def _start_clean(self, state: State) -> None:
        """Drops the batch, loss and partial gradients of a fit that raised within a batch."""
        state.batch = state.microbatch = state.outputs = state.loss = None
        self.hooks.zero_grad(state, state.optimizers)
        self._has_begun = self._can_update = False

    def _interrupted_fit(self, state: State) -> InterruptedFit:
        """Returns the progress of this fit for the next one, which continues it."""
        is_training = self._has_begun or self._can_update
        may_have_stepped = is_training and state.owner("train_batch") != "core"
        return InterruptedFit(self._stage, is_training, may_have_stepped, state.batch, state.loss)

    def _continue_after_epoch(self, state: State) -> None:
        """Runs the remaining events of an epoch at whose end an earlier fit raised."""
        interrupted = self._interrupted
        require_same_stage(self.processes, interrupted)
        if interrupted is None:
            return
        if interrupted.is_after_epoch:
            self._interrupted = None
            if interrupted.stage != "epoch done":
                self._active.continue_events(state)
                self._after_epoch(state)
            self.resume_point.enter_again("between epochs")
        elif interrupted.is_in_epoch:
            self.resume_point.enter_again("in epoch")

    def _continue_batch(self, state: State, feed: Feed) -> None:
        """Continues the batch in which an earlier fit raised.

        If the weights are unchanged, the batch is fetched again. If the batch has been trained on, the
        remaining events follow, beginning with the plugin that raised. A batch that raised during an
        optimizer step isn't repeated, and a warning names it.
        """
        interrupted = self._interrupted
        self._interrupted = None
        if interrupted is None:
            return
        if interrupted.repeats_batch:
            feed.put_back()
            if interrupted.has_begun:
                warn_of_counts_twice(state)
        elif interrupted.is_in_epoch and interrupted.stage != "batch done":
            self._stage = interrupted.stage
            state.batch = interrupted.batch
            state.loss = interrupted.loss
            if interrupted.loses_batch:
                state.loss = None
                self._stepped = False
                warn_of_lost_batch(state, interrupted)
            if interrupted.has_uncounted_batch:
                self.processes.exchange.start(state)
                samples, tokens, seconds = self.processes.exchange.end(state)
                state.clock.end_batch(samples, tokens, seconds)
                self._stage = "counted"
            self._active.continue_events(state)
            self._after_batch(state)

    def state_dict(self) -> dict[str, Any]:
        """Returns a `LoopState`."""
        return as_dict(LoopState(self.is_finished, self._evaluated_at, self._saved_at))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `LoopState`, in another process."""
        saved = from_dict(LoopState, state)
        self._evaluated_at = saved.evaluated_at
        self._saved_at = saved.saved_at
        self.is_finished = saved.is_finished

    def _evaluate_once(self, state: State) -> None:
        """Evaluates, unless there was an evaluation at this batch count."""
        if self._evaluated_at != state.clock.batch:
            self.hooks.evaluate(state)
            self._evaluated_at = state.clock.batch

    def _evaluate_test_sets(self, state: State) -> None:
        """Evaluates the test sets, with the best weights if they were kept."""
        names = [name for name in state.eval_dataloaders if name in state.test_sets]
        if names:
            with state.evaluating(names), self._best_weights(state):
                self.hooks.evaluate(state)

    def _save(self, state: State) -> None:
        """Saves a checkpoint; at the last batch of the fit it is left to the end of the fit."""
        if self._ends_here(state):
            state.checkpoint_requested = True
        else:
            self.save_once(state)

    def _ends_here(self, state: State) -> bool:
        """Returns whether the fit ends at this batch count without an evaluation of test sets first."""
        if any(name in state.test_sets for name in state.eval_dataloaders):
            return False
        is_stopped = state.stop_reason is not None and not is_interruption(state.stop_reason)
        return is_stopped or state.clock.reached(state.until)

    def save_once(self, state: State) -> None:
        """Saves a checkpoint, unless one was saved at this batch count."""
        if self._saved_at == state.clock.batch:
            return
        # Assigned before saving, because the checkpoint contains it.
        previously_saved_at = self._saved_at
        self._saved_at = state.clock.batch
        was_requested = state.checkpoint_requested
        state.checkpoint_requested = False
        try:
            # Loggers receive all numbers first, so that none must be kept in the checkpoint.
            self.deliver_everything(state)
            self.hooks.save_checkpoint(state)
        except BaseException:
            self._saved_at = previously_saved_at
            state.checkpoint_requested = was_requested
            raise


def forward_and_loss(state: State, hooks: Plans) -> None:
    """Computes the outputs and the loss of a microbatch."""
    hooks.before_forward(state)
    state.outputs = hooks.forward(state)
    hooks.after_forward(state)
    hooks.before_loss(state)
    state.loss = hooks.loss(state)
    hooks.after_loss(state)
