"""The events, questions and collections, in firing order; each docstring is the hook's contract.

An event notifies: every implementation is called and returns nothing. A question, named `should_...`, is
answered by any number of plugins: a single True means yes, and an answer must not change anything. A collection
gathers the answers of all plugins. Hooks that do the work are actions, in `actions.py`. Plugins may
declare further hooks: `docs/how-to/let-others-extend-yours.md`.

Every contract has the same lines. *Fires* says how often the hook is called, and in which order relative to
other hooks. *State* lists the attributes of the State that are new or worth knowing at this moment. *May*
lists permitted changes by algorithms; a callback only reads. *Must not* lists actions that break the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from eventloop.hook_markers import declared_hooks, hookspec

if TYPE_CHECKING:
    from pathlib import Path

    from eventloop.clock import Moment
    from eventloop.state import State
    from eventloop.urls import Url


class Events(Protocol):
    """Every event, question and collection of a run."""

    @hookspec(per="run")
    def init(self, state: State) -> None:
        """Called after the model is built and before the optimizer is.

        Fires: once, when the trainer is built, on every rank, after `build_model`.
        State: `model` on its device; no optimizers, no data loaders.
        May: change or replace `state.model` (model surgery).
        Must not: keep references to parameters that `wrap_model` may replace.
        """

    @hookspec(per="run", collection=True)
    def unsuitable(self, state: State) -> str | None:
        """Asks each plugin why it can't be used in this run.

        Asked: once, with the first batch, after `build_train_dataloader`; not without training data.
        State: `batch`, `inputs`, `targets`: the first batch, on the device; no eval data loaders.
        Answer: the reason, or None if it can be used. A reason on one rank switches the plugin off on
            all, and is an error if the plugin was asked for by name.
        Must not: change anything; the batch comes again in training.
        """

    @hookspec(per="run")
    def before_load(self, state: State) -> None:
        """Called before a checkpoint is loaded.

        Fires: once, only where a checkpoint is loaded, before `restore_model`.
        State: complete, with the values that the checkpoint will replace.
        May: prepare the model for the shapes of the checkpoint.
        Must not: read the checkpoint; `load_state_dict` receives the plugin's part of it.
        """

    @hookspec(per="run")
    def after_load(self, state: State) -> None:
        """Called when the trainer is complete, restored from a checkpoint or new.

        Fires: once, always, as the last event of the trainer's constructor.
        State: complete; `clock` is at the start of the run, or at the time of the checkpoint.
        May: copy weights (to start an average, for example), check the work of other plugins.
        Must not: train.
        """

    @hookspec(per="any", collection=True)
    def header_note(self, state: State) -> str | None:
        """Asks each plugin for a line about itself in the header.

        Asked: where the header is printed, and by `trainer.notes`; never within a batch.
        State: complete, after `after_load`.
        Answer: one line, which follows the plugin's name; "" or None for nothing.
        Must not: change anything; exchange data with other ranks, which may not be asked.
        """

    @hookspec(per="run")
    def training_start(self, state: State) -> None:
        """Called when training begins.

        Fires: at the first fit of this process, and at the first after `training_end`.
        State: complete; the model is in training mode.
        May: acquire resources that are kept over several fits.
        Must not: assume that the clock is at zero.
        """

    @hookspec(per="fit")
    def fit_start(self, state: State) -> None:
        """Called when a call of `fit` begins.

        Fires: at every fit, after `training_start`.
        State: complete; the model is in training mode, and stays as hooks leave it.
        May: freeze layers, put parts of the model in evaluation mode, move `until`.
        Must not: iterate over the data loaders.
        """

    @hookspec(per="epoch", for_algorithms=True)
    def should_rebuild_dataloader(self, state: State) -> bool | None:
        """Asks whether `build_train_dataloader` should be called again for this epoch.

        Asked: at the start of every epoch but the first; algorithms only.
        Answer: from the clock, the same on all ranks.
        """

    @hookspec(per="epoch")
    def epoch_start(self, state: State) -> None:
        """Called when an epoch begins or continues.

        Fires: once an epoch, and again if a fit continues within the epoch.
        State: `clock.epoch` is this epoch's number, from 0; `resumed` is true if it continues.
        May: change anything that depends on the epoch.
        Must not: draw from the global random generators; the order of data comes from them next.
        """

    @hookspec(per="batch")
    def before_dataloader(self, state: State) -> None:
        """Called before the next batch is fetched.

        Fires: once a batch, never without its `after_dataloader`.
        State: no batch; `clock.batch` batches are done.
        May: measure the time.
        Must not: take batches itself.
        """

    @hookspec(per="batch")
    def after_dataloader(self, state: State) -> None:
        """Called when a batch is on the device.

        Fires: once a batch, before `batch_start`.
        State: `batch`, `inputs`, `targets`: the whole batch.
        May: change or replace the batch.
        Must not: wait for the device.
        """

    @hookspec(per="batch")
    def batch_start(self, state: State) -> None:
        """Called when work on a batch begins.

        Fires: once a batch, after `after_dataloader`.
        State: `batch`, `inputs`, `targets`: the whole batch, after all transforms.
        May: change the batch, parameters, optimizer settings.
        Must not: wait for the device.
        """

    @hookspec(per="batch", for_algorithms=True)
    def should_skip_batch(self, state: State) -> bool | None:
        """Asks whether this batch should be skipped: no forward, no step, but it counts.

        Asked: once a batch, after `batch_start`; algorithms only.
        Answer: without waiting for the device, the same on all ranks.
        """

    @hookspec(per="batch")
    def before_train_batch(self, state: State) -> None:
        """Called before the forward and backward passes over this batch.

        Fires: once a batch, whatever the number of microbatches, before `split_batch`.
        State: `batch`, `inputs`, `targets`: the whole batch; gradients are empty.
        May: change the batch a last time.
        Must not: wait for the device.
        """

    @hookspec(per="microbatch")
    def before_forward(self, state: State) -> None:
        """Called before a microbatch goes through the model.

        Fires: once a microbatch.
        State: `microbatch`, `inputs`, `targets`.
        May: change `inputs` and `targets`.
        Must not: change the number of samples; the weights of the mean are fixed by now.
        """

    @hookspec(per="microbatch", closes="before_forward")
    def after_forward(self, state: State) -> None:
        """Called after the model has returned its outputs.

        Fires: once a microbatch.
        State: `outputs`, with their graph.
        May: change or replace `outputs`.
        Must not: wait for the device.
        """

    @hookspec(per="microbatch")
    def before_loss(self, state: State) -> None:
        """Called before the loss is computed.

        Fires: once a microbatch.
        State: `outputs`, `targets`.
        May: change or replace both.
        Must not: wait for the device.
        """

    @hookspec(per="microbatch", closes="before_loss")
    def after_loss(self, state: State) -> None:
        """Called after the loss of this microbatch was computed.

        Fires: once a microbatch.
        State: `loss`, shape (), with its graph, not yet weighted or scaled.
        May: replace `loss`, for example by a sum with a penalty.
        Must not: wait for the device.
        """

    @hookspec(per="microbatch")
    def before_backward(self, state: State) -> None:
        """Called before the gradients of this microbatch are computed.

        Fires: once a microbatch.
        State: `loss`, shape (), with its graph; `.grad` holds the earlier microbatches' sum.
        May: register hooks on tensors, replace `loss`.
        Must not: call backward.
        """

    @hookspec(per="microbatch", closes="before_backward")
    def after_backward(self, state: State) -> None:
        """Called after this microbatch's gradients were added to `.grad`.

        Fires: once a microbatch, on every rank, before `clip_gradients`.
        State: `loss`, shape (); its graph is gone, gradients are still scaled under fp16.
        May: read or change `.grad`.
        Must not: wait for the device.
        """

    @hookspec(per="batch", closes="before_train_batch")
    def after_train_batch(self, state: State) -> None:
        """Called when the gradients of the batch are complete.

        Fires: once a batch, after `clip_gradients`, before `optimizer_step`.
        State: `loss`, shape (), the batch's mean, detached; gradients unscaled and clipped.
        May: read or change `.grad`.
        Must not: wait for the device.
        """

    @hookspec(per="batch", for_algorithms=True)
    def should_skip_step(self, state: State) -> bool | None:
        """Asks whether the optimizers should ignore this batch's gradients.

        Asked: once a batch, after `after_train_batch`; algorithms only.
        Answer: without waiting for the device, the same on all ranks. Schedulers don't move then.
        """

    @hookspec(per="batch", closes="batch_start")
    def batch_end(self, state: State) -> None:
        """Called when a batch is done.

        Fires: once a batch, also after a skipped batch.
        State: `clock` has advanced; the learning rates are still those that this step used;
            `loss` is the batch's, detached, or None after a skipped batch; `.grad` was
            emptied by `zero_grad`: `after_train_batch` sees gradients.
        May: change parameters (averaging, projection).
        Must not: wait for the device; `batch` is dropped afterwards.
        """

    @hookspec(per="batch")
    def should_eval(self, state: State) -> bool | None:
        """Asks whether to evaluate now.

        Asked: after every batch's schedulers, and after every epoch's.
        Answer: from the clock or from metrics, the same on all ranks. There is at most one evaluation
            for each batch count.
        """

    @hookspec(per="eval")
    def eval_before_all(self, state: State) -> None:
        """Called before an evaluation over all eval data loaders.

        Fires: once an evaluation.
        State: until `eval_after_all`, the model is in evaluation mode and gradients are off; `batch` is
            None.
        May: change the model for the evaluation; to swap weights, wrap the action `evaluate`.
        Must not: train.
        """

    @hookspec(per="eval")
    def eval_start(self, state: State) -> None:
        """Called before the evaluation over one data loader.

        Fires: once an eval data loader, in the order of their names in the task.
        State: `eval_name` is the data loader's name; its metrics are empty.
        May: acquire resources for this data loader.
        Must not: iterate over the data loader.
        """

    @hookspec(per="eval batch")
    def eval_batch_start(self, state: State) -> None:
        """Called when an eval batch is on the device.

        Fires: once an eval batch.
        State: `batch`, `inputs`, `targets`.
        May: change the batch.
        Must not: draw from the global random generators without need.
        """

    @hookspec(per="eval batch")
    def eval_before_forward(self, state: State) -> None:
        """Called before an eval batch goes through the model.

        Fires: once an eval batch, before `eval_forward`.
        State: `batch`, `inputs`, `targets`.
        May: change `inputs`.
        Must not: wait for the device.
        """

    @hookspec(per="eval batch")
    def eval_after_forward(self, state: State) -> None:
        """Called after the outputs of an eval batch were computed.

        Fires: once an eval batch, before `update_metrics`.
        State: `outputs`, without a graph.
        May: change or replace `outputs`.
        Must not: wait for the device.
        """

    @hookspec(per="eval batch", closes="eval_batch_start")
    def eval_batch_end(self, state: State) -> None:
        """Called when an eval batch is done.

        Fires: once an eval batch, after `update_metrics`.
        State: `batch`, `outputs`, dropped afterwards.
        May: add up its own numbers, on the device.
        Must not: wait for the device.
        """

    @hookspec(per="eval", closes="eval_start")
    def eval_end(self, state: State) -> None:
        """Called after the evaluation over one data loader.

        Fires: once an eval data loader.
        State: `eval_metrics[eval_name]`: tensors, shape (), by metric name.
        May: log its own numbers and texts; call `state.model`, for example to generate from prompts.
        Must not: change the metrics.
        """

    @hookspec(per="eval")
    def eval_after_all(self, state: State) -> None:
        """Called after an evaluation over all eval data loaders.

        Fires: once an evaluation.
        State: `eval_metrics` of every data loader; the model is still in evaluation mode.
        May: decide by the metrics; log texts, call `state.model`.
        Must not: train.
        """

    @hookspec(per="batch")
    def batch_checkpoint(self, state: State) -> None:
        """Called after a batch and the evaluation that followed it.

        Fires: once a batch, before `should_checkpoint` is asked.
        State: `eval_metrics` are new if this batch was followed by an evaluation.
        May: ask for a checkpoint with `state.request_checkpoint()`.
        Must not: change the training; a checkpoint may be saved next.
        """

    @hookspec(per="batch")
    def should_checkpoint(self, state: State) -> bool | None:
        """Asks whether to save a checkpoint now.

        Asked: after `batch_checkpoint` and after `epoch_checkpoint`.
        Answer: the same on all ranks. There is at most one checkpoint for each batch count; at the last
            batch count, it is saved when the fit is over.
        """

    @hookspec(per="batch")
    def should_end_epoch(self, state: State) -> bool | None:
        """Asks whether this epoch should end here, with data left over.

        Asked: once a batch. The epoch counts as complete.
        Answer: the same on all ranks.
        """

    @hookspec(per="batch")
    def should_stop(self, state: State) -> bool | None:
        """Asks whether the run should stop.

        Asked: once a batch and once an epoch.
        Answer: the same on all ranks; to give a reason, call `state.request_stop(reason)` in an event instead.
        """

    @hookspec(per="epoch", closes="epoch_start")
    def epoch_end(self, state: State) -> None:
        """Called when an epoch is over, or is interrupted partway.

        Fires: once for each `epoch_start`.
        State: `clock.epoch` has advanced, unless the epoch was interrupted partway.
        May: change parameters, and anything that depends on the epoch.
        Must not: iterate over the data loaders.
        """

    @hookspec(per="epoch")
    def epoch_checkpoint(self, state: State) -> None:
        """Called after an epoch and the evaluation that followed it.

        Fires: once an epoch, before `should_checkpoint` is asked.
        State: `eval_metrics` are new if this epoch was followed by an evaluation.
        May: ask for a checkpoint with `state.request_checkpoint()`.
        Must not: change the training; a checkpoint may be saved next.
        """

    @hookspec(per="fit", closes="fit_start")
    def fit_end(self, state: State) -> None:
        """Called when a call of `fit` is done.

        Fires: once for each `fit_start`, unless something raised.
        State: every logged number has been delivered.
        May: write files, flush.
        Must not: change the model, since the change would be in no checkpoint; log, since loggers no
            longer receive values (use `epoch_end` or `eval_after_all`).
        """

    @hookspec(per="run", closes="training_start")
    def training_end(self, state: State) -> None:
        """Called when the whole duration is done, or the run was stopped.

        Fires: once for each `training_start`, after `fit_end`.
        State: as after `fit_end`.
        May: write reports.
        Must not: change the model, or log.
        """

    @hookspec(per="predict")
    def predict_start(self, state: State) -> None:
        """Called when a prediction begins.

        Fires: once a call of `predict`.
        State: the model is in evaluation mode and gradients are off.
        May: acquire resources for this prediction.
        Must not: iterate over the data loader.
        """

    @hookspec(per="predict")
    def predict_batch_start(self, state: State) -> None:
        """Called when a batch to predict is on the device.

        Fires: once a batch.
        State: `batch`, `inputs`; `targets` where the batch has them.
        May: change the batch.
        Must not: change the number of samples.
        """

    @hookspec(per="predict")
    def predict_before_forward(self, state: State) -> None:
        """Called before a batch goes through the model.

        Fires: once a batch, before `predict_forward`.
        State: `batch`, `inputs`.
        May: change `inputs`.
        Must not: wait for the device.
        """

    @hookspec(per="predict")
    def predict_after_forward(self, state: State) -> None:
        """Called after the outputs of a batch were computed.

        Fires: once a batch.
        State: `outputs`, on the device, without a graph.
        May: change or replace `outputs`; its value at `predict_batch_end` is returned.
        Must not: wait for the device.
        """

    @hookspec(per="predict", closes="predict_batch_start")
    def predict_batch_end(self, state: State) -> None:
        """Called when a batch has been predicted.

        Fires: once a batch; `outputs` are kept for the caller next.
        State: `batch`, `outputs`, dropped afterwards.
        May: change or replace `outputs`.
        Must not: wait for the device.
        """

    @hookspec(per="predict", closes="predict_start")
    def predict_end(self, state: State) -> None:
        """Called when a prediction is done.

        Fires: once a call of `predict`.
        State: the model is still in evaluation mode.
        May: write files.
        Must not: train.
        """

    @hookspec(per="any")
    def log(self, state: State, numbers: dict[str, float], at: Moment) -> None:
        """Called with the numbers that were logged at the same moment.

        Fires: for each moment with numbers, in order, at log intervals and before `fit_end`,
            when they have arrived on the host.
        State: later than the numbers; `at` is the moment that they belong to.
        May: write them.
        Must not: change `numbers`, which all loggers share.
        """

    @hookspec(per="any")
    def log_text(
        self, state: State, texts: dict[str, str | dict[str, list[Any]]], at: Moment
    ) -> None:
        """Called with the texts and tables that were logged at the same moment.

        Fires: for each moment with texts, only on rank 0, after `log` of the same moment.
        State: later than the texts; `at` is the moment that they belong to. A table is a dict of its
            columns, each a list of as many texts, numbers or None.
        May: write them.
        Must not: change `texts`, which all loggers share; print a text unchanged, since it may be
            long and have control characters (use `eventloop.toolbox.one_line`).
        """

    @hookspec(per="any")
    def checkpoint_saved(self, state: State, path: Path | Url) -> None:
        """Called after a checkpoint was written to disk completely.

        Fires: once for each checkpoint that the core has written, only on rank 0, at the end of a
            batch or before `fit_end`. A checkpoint at the end of a fit may replace an earlier one.
        State: later than the checkpoint, whose manifest records its moment.
        May: copy it elsewhere; notify a person or an experiment tracker.
        Must not: change the folder, or the training, since the other ranks wouldn't know; rely on
            the folder later, since old checkpoints are deleted.
        """

    @hookspec(per="any")
    def exception(self, state: State, error: BaseException) -> None:
        """Called when something raised and training ends.

        Fires: once a failure; every plugin is called, even if another plugin raises.
        State: as the failure left it.
        May: write information that helps to find the cause.
        Must not: swallow it; it is raised again afterwards.
        """

    @hookspec(per="run")
    def close(self, state: State) -> None:
        """Called when the trainer is closed.

        Fires: once, always: at `trainer.close()`, at the end of `with Trainer(...)`, after a
            constructor that fails, at the interpreter's exit; in reverse order.
        State: as the last event left it; incomplete after a constructor that failed.
        May: close files and processes.
        Must not: fail if the plugin never opened anything.
        """


EVENTS_AND_QUESTIONS = declared_hooks([Events])
# Without questions and collections.
EVENTS = {name: hook for name, hook in EVENTS_AND_QUESTIONS.items() if hook.kind == "event"}
