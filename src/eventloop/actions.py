"""The actions, in the order in which the loop asks for them.

An action does something, and a single implementation owns it: a plugin's, else the task's, else the
core's in `training/default_actions.py`. The owner must return a result that isn't None. To change an action
instead of replacing it, wrap it: a wrapper runs around the owner, and calling `state.again()` in the wrapper
repeats the wrapped implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from eventloop.hook_markers import declared_hooks, hookspec

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torchmetrics import Metric

    from eventloop.checkpoint.checkpoint_export import FoundWeights
    from eventloop.data.batches import Count
    from eventloop.mesh import Layout
    from eventloop.state import State
    from eventloop.training.grad_scaling import StepOutcome
    from eventloop.urls import Url


class Actions(Protocol):
    """Everything that the loop lets others do."""

    @hookspec(per="run", firstresult=True)
    def build_mesh(self, state: State) -> Layout:
        """Returns the arrangement of the ranks. Default: each rank trains on its own samples.

        Asked: once, before `build_model`, with the same answer on all ranks.

        To let ranks share samples, wrap it: `(yield).sharing("tp", 2)` adds a dimension to
        `state.mesh`.
        """

    @hookspec(per="run", firstresult=True)
    def build_model(self, state: State) -> nn.Module:
        """Returns the model, on `state.device`.

        Asked: once, first of all, after seeding.
        """

    @hookspec(per="run", firstresult=True)
    def wrap_model(self, state: State) -> nn.Module:
        """Returns the module that a forward pass with gradients calls: `state.model`, or a wrapper.

        Asked: once, after `init`.

        Parameters of `state.model` may be replaced here. With several ranks, the module's backward
        pass averages gradients over the ranks, only on the last microbatch; microbatches are
        weighted accordingly. Default: DistributedDataParallel with several ranks.
        """

    @hookspec(per="run", firstresult=True)
    def wrap_companion(self, state: State, companion: nn.Module) -> nn.Module:
        """Returns a second model, such as a teacher or a reference, on the device of this rank.

        Asked: by `state.companion`, before the optimizers are built.

        Its parameters may be replaced, in place. It isn't trained, and all ranks have the same
        weights. Default: the module, moved to `state.device`.
        """

    @hookspec(per="run", firstresult=True)
    def build_optimizers(self, state: State) -> Mapping[str, Optimizer]:
        """Returns the optimizers by name, over the parameters of `state.model`.

        Asked: once, after `wrap_model`.
        """

    @hookspec(per="epoch", firstresult=True)
    def build_train_dataloader(self, state: State) -> Any:
        """Returns the iterable of training batches, or () without training data.

        Asked: once, and again at the start of an epoch if `should_rebuild_dataloader`.

        With several ranks, a map-style `DataLoader` gets a `DistributedSampler`, and a list is
        divided among the ranks; any other iterable must yield the batches of `state.rank`.
        """

    @hookspec(per="run", firstresult=True)
    def build_eval_dataloaders(self, state: State) -> Mapping[str, Any]:
        """Returns the iterables of eval batches by name.

        Asked: once, after `build_train_dataloader`.

        With several ranks, each rank evaluates a part, as in training, but every sample only once.
        """

    @hookspec(per="run", firstresult=True)
    def build_schedulers(self, state: State) -> Mapping[str, Sequence[tuple[str, LRScheduler]]]:
        """Returns the schedulers by the interval after which they move: "ba" or "ep".

        Asked: once, when the optimizers and the length of the run are known.

        Each scheduler comes with the name of its optimizer.
        """

    @hookspec(per="run", firstresult=True)
    def build_metrics(self, state: State, dataset: str) -> Mapping[str, Metric]:
        """Returns fresh metrics by name, on `state.device`.

        Asked: once for training and once for each eval data loader.

        Args:
            dataset: "train", or "eval/NAME" for the eval data loader NAME.
        """

    @hookspec(per="run", firstresult=True)
    def restore_model(self, state: State, weights: Mapping[str, Tensor], strict: bool) -> bool:
        """Loads weights into `state.model`, in place; True when done.

        The weights for DTensors are DTensors with the same sharding. If a plugin's `capture_model`
        returns slices, the others may be `SavedTensor`s, of which each rank reads only its part.

        Asked: after `before_load`, and by `trainer.load_weights`. Also for test sets: with the best
        weights, and then with the weights that `state.model.state_dict()` had on this rank before.
        """

    @hookspec(per="run", firstresult=True)
    def read_weights(self, state: State, path: Path, plugins: Sequence[str]) -> FoundWeights:
        """Finds the weights at a path. Default: reads safetensors files and checkpoints.

        Asked: by `trainer.load_weights`, which has `restore_model` load them.

        Args:
            plugins: folded names of the plugins whose saved states are needed, too.
        """

    @hookspec(per="run", firstresult=True)
    def restore_optimizers(self, state: State, states: Mapping[str, dict[str, Any]]) -> bool:
        """Loads optimizer states by name, in place; True when done.

        Their tensors may be `SavedTensor`s where the weights may be.

        Asked: after `restore_model`, where a checkpoint is loaded.
        """

    @hookspec(per="batch", firstresult=True)
    def count_batch(self, state: State, batch: Any) -> Count:
        """Counts the samples and tokens of a batch.

        Asked: for every batch on the host, before it is copied to the device; `state.batch` is None.
            Also by `state.current_count()` for the current batch or microbatch, which uses only the
            number of samples, since counting tokens may wait for the device.
        """

    @hookspec(per="batch", firstresult=True)
    def train_batch(self, state: State) -> bool | StepOutcome:
        """Trains on `state.batch`; returns whether the optimizers made a step.

        Asked: once a batch, unless `should_skip_batch`.

        Default: everything from `before_train_batch` to `zero_grad`. Its result is that of
        `optimizer_step`.
        """

    @hookspec(per="batch", firstresult=True)
    def split_batch(self, state: State) -> Sequence[Any]:
        """Returns the microbatches of `state.batch`, at least one.

        Asked: once a batch, after `before_train_batch`, and by each closure call.
        """

    @hookspec(per="microbatch", firstresult=True)
    def weigh_microbatch(self, state: State) -> float | Tensor:
        """Returns the weight of `state.microbatch`, or `state.batch` in evaluation, in the mean loss.

        Asked: once a microbatch, after `split_batch`, if there are several microbatches or the ranks
            may differ; in evaluation, for means over a set.

        A number, or a tensor of shape () on the device. Default: the number of labels other than -100
        if the model computes its own loss from labels of shape (N, T), otherwise of samples.
        """

    @hookspec(per="microbatch", firstresult=True)
    def forward(self, state: State) -> Any:
        """Returns the outputs of the model for `state.microbatch`, or `state.batch` in evaluation.

        Asked: once a microbatch, after `before_forward`; by `eval_forward` and `predict_forward`.
        Runs under autocast.
        """

    @hookspec(per="microbatch", firstresult=True)
    def loss(self, state: State) -> Tensor:
        """Returns the loss of `state.outputs` and `state.targets`, a tensor of shape ().

        Asked: once a microbatch, after `before_loss`. Runs under autocast. The loss is a
        mean, and `weigh_microbatch` returns the number of its terms. In the backward pass of the
        loss, `state.outputs` may be None.
        """

    @hookspec(per="microbatch", firstresult=True)
    def backward(self, state: State, loss: Tensor) -> bool:
        """Adds the gradients of `loss` to `.grad`; True when done.

        Asked: once a microbatch, after `before_backward`.

        An owner calls `state.precision.backward(loss)`, which scales the loss under fp16.

        Args:
            loss: shape (), weighted for the mean over the batch.
        """

    @hookspec(per="batch", firstresult=True)
    def clip_gradients(
        self, state: State, optimizers: Mapping[str, Optimizer]
    ) -> dict[str, Tensor]:
        """Clips the unscaled gradients of these optimizers' parameters, in place.

        Asked: once a batch, after the last `after_backward`, and by each closure call.

        Returns numbers to log, or {}. Default: `{"grad_norm": ...}`.
        """

    @hookspec(per="batch", firstresult=True)
    def optimizer_step(
        self, state: State, optimizers: Mapping[str, Optimizer], closure: Callable[[], Tensor]
    ) -> bool | StepOutcome:
        """Lets these optimizers step; True if they did.

        Asked: once a batch, unless `should_skip_step`.

        Under fp16, a step is skipped if gradients overflowed, which the host learns later. The result
        is then a `StepOutcome`, which is true or false like a bool, and waits for the device when it
        is tested. An owner returns the result of `state.precision.step(optimizer)`.

        Args:
            closure: repeats `split_batch` to `clip_gradients` without events, from empty
                gradients, and returns the batch's loss, shape (), detached.
        """

    @hookspec(per="batch", firstresult=True)
    def zero_grad(self, state: State, optimizers: Mapping[str, Optimizer]) -> bool:
        """Empties the gradients of these optimizers' parameters; True when done.

        Asked: once a batch, at the end of `train_batch`; at the start of each closure call; and by a
            fit after a failed fit.
        """

    @hookspec(per="batch", firstresult=True)
    def scheduler_step(self, state: State, interval: Literal["ba", "ep"]) -> bool:
        """Moves the schedulers that are counted in this interval; True when done.

        Asked: after every batch with an optimizer step, and after every complete epoch.

        Under fp16, it is called when the host knows that the step wasn't skipped: before the next
        `optimizer_step`, or before an evaluation, a checkpoint or the end of the epoch.
        """

    @hookspec(per="eval", firstresult=True)
    def evaluate(self, state: State) -> dict[str, dict[str, Tensor]]:
        """Evaluates over all eval data loaders; returns the metrics by data loader and name.

        Asked: if `should_eval`, at most once a batch count, and by `trainer.eval`.

        Default: everything from `eval_before_all` to `eval_after_all`. Wrap it to evaluate other
        weights.
        """

    @hookspec(per="eval", firstresult=True)
    def eval_batches(self, state: State, dataloader: Any) -> Iterable[Any]:
        """Returns the batches of a data loader, to evaluate or predict for. Default: the loader.

        Asked: for each data loader, after `eval_start` or `predict_start`.

        Wrap it to inspect batches before they are copied to the device, or to read ahead.
        """

    @hookspec(per="eval batch", firstresult=True)
    def eval_forward(self, state: State) -> Any:
        """Returns the outputs for `state.batch`, without gradients. Default: `forward`.

        Asked: once an eval batch, after `eval_before_forward`.
        """

    @hookspec(per="eval batch", firstresult=True)
    def update_metrics(self, state: State, metrics: Mapping[str, Metric]) -> bool:
        """Adds `state.outputs` and `state.targets` to these metrics; True when done.

        Asked: once an eval batch, after `eval_after_forward`; in training once a microbatch,
            after the loss, where the task has metrics for training.
        """

    @hookspec(per="predict", firstresult=True)
    def predict(self, state: State, dataloader: Any) -> list[Any]:
        """Returns the outputs for a data loader, as a list with an entry for each batch, on the host.

        Asked: by `trainer.predict`.

        Default: everything from `predict_start` to `predict_end`. Wrap it to predict with other
        weights.
        """

    @hookspec(per="predict", firstresult=True)
    def predict_forward(self, state: State) -> Any:
        """Returns the outputs for `state.batch`, without gradients. Default: `forward`.

        Asked: once a batch, after `predict_before_forward`.
        """

    @hookspec(per="run", firstresult=True)
    def capture_model(self, state: State) -> Mapping[str, Tensor]:
        """Returns the weights of `state.model` by name: tensors, or a `TensorSlice` of each.

        Asked: on every rank, by `save_checkpoint` and `export`, and before weights are restored on
            several ranks. Only rank 0's whole tensors are written; other ranks may return {}. Each
            rank writes its own slices; a tensor that isn't spread over ranks stays whole.
        """

    @hookspec(per="run", firstresult=True)
    def select_weights(self, state: State, names: Sequence[str]) -> Iterable[str]:
        """Returns the names of the weights that a checkpoint holds. Default: all.

        Asked: for each checkpoint, on every rank.

        Weights that are left out must be built by the task, and must not change: a checkpoint has a
        digest of them, and is only loaded into a model with the same weights.

        Args:
            names: the names that `capture_model` returns.
        """

    @hookspec(per="run", firstresult=True)
    def capture_optimizers(self, state: State) -> Mapping[str, dict[str, Any]]:
        """Returns the optimizers' state dicts by name, in the format of torch's `state_dict()`.

        Asked: by `save_checkpoint`, as `capture_model`: with slices if the model has slices.
        """

    @hookspec(per="batch", firstresult=True)
    def save_checkpoint(self, state: State) -> Path | Url:
        """Saves a checkpoint in `state.run_dir` or at the run's URL; returns its path or URL.

        Asked: if `should_checkpoint`, at most once a batch count.
        """

    @hookspec(per="run", firstresult=True)
    def export(self, state: State, path: Path) -> Path:
        """Writes the weights that evaluation uses to a safetensors file; returns its path.

        Asked: by `trainer.export`.

        Wrap it to export other weights.
        """


ACTIONS = declared_hooks([Actions])
