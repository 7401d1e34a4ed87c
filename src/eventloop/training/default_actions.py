"""The core's own plugin: the default implementation of actions and questions.

The defaults of `train_batch`, `evaluate` and `predict` belong to the loop and are in `loop.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from eventloop.data import batches
from eventloop.data.batches import Count
from eventloop.data.combined import NoData
from eventloop.data.loaders import loader_of
from eventloop.data.microbatches import Microbatches
from eventloop.data.token_weights import keeps_cache, may_take, may_weigh_tokens, num_tokens
from eventloop.errors import TaskError, a
from eventloop.hook_markers import hookimpl
from eventloop.mesh import Layout
from eventloop.training.failed_inputs import note_input
from eventloop.training.gradient_clipping import GradientClipping
from eventloop.training.metrics import loss_in, predictions
from eventloop.training.optimizers import (
    FollowsMetric,
    drop_gradients,
    require_optimizer,
    wants_closure,
)
from eventloop.training.sharded_tensors import slice_of, sliced
from eventloop.training.weight_export import export, fit_to_load

if TYPE_CHECKING:
    from torchmetrics import Metric

    from eventloop.plugin.plans import ActivePlugins
    from eventloop.state import State
    from eventloop.training.grad_scaling import StepOutcome

# Implementations of these hooks may still read the outputs when the gradients are computed.
_HOOKS_AFTER_FORWARD = (
    "before_loss",
    "loss",
    "after_loss",
    "before_backward",
    "backward",
    "after_backward",
)


class _ModelTraits(NamedTuple):
    takes_labels: bool
    weighs_tokens: bool
    keeps_cache: bool


class Defaults:
    """Implements every action that neither a plugin nor the task implements.

    Args:
        active: the plugins of the run, and the plans of actions that a default calls.
        wrap: wraps the model for training in several processes.
        mean: returns the mean of a loss over the ranks.
    """

    __slots__ = (
        "_active",
        "_clip",
        "_counted_dataloader",
        "_latest_count",
        "_mean",
        "_metric_schedulers",
        "_num_samples",
        "_outputs_are_needed",
        "_traits",
        "_with_closure",
        "_wrap",
    )

    def __init__(
        self,
        active: ActivePlugins,
        wrap: Callable[[State], nn.Module],
        mean: Callable[[Tensor], Tensor],
    ) -> None:
        self._active = active
        self._outputs_are_needed = True
        self._wrap = wrap
        self._mean = mean
        self._clip = GradientClipping()
        self._with_closure: frozenset[str] = frozenset()
        self._metric_schedulers: tuple[FollowsMetric, ...] = ()
        self._latest_count = Count(0, 0)
        self._counted_dataloader: Any = None
        self._num_samples: Callable[[Any], int] = batches.num_samples
        self._traits: tuple[type | None, _ModelTraits] = (None, _ModelTraits(True, False, False))

    @hookimpl
    def after_load(self, state: State) -> None:
        self._with_closure = frozenset(
            name for name, optimizer in state.optimizers.items() if wants_closure(optimizer)
        )
        schedulers = [scheduler for pairs in state.schedulers.values() for _, scheduler in pairs]
        self._metric_schedulers = tuple(
            scheduler for scheduler in schedulers if isinstance(scheduler, FollowsMetric)
        )
        for scheduler in self._metric_schedulers:
            scheduler.begin(state)
        # Inside a compiled region, the first look at the model would cause a recompilation.
        self._traits_of(state)
        self._outputs_are_needed = self._has_hooks_after_forward()

    @hookimpl
    def eval_after_all(self, state: State) -> None:
        for scheduler in self._metric_schedulers:
            scheduler.observe(state)

    @hookimpl
    def build_mesh(self, state: State) -> Layout:
        return Layout({"data": state.world_size})

    @hookimpl
    def build_model(self, state: State) -> nn.Module:
        raise TaskError("the task has no model", fix="give Task(model=...) or build_model")

    @hookimpl
    def wrap_model(self, state: State) -> nn.Module:
        return self._wrap(state)

    @hookimpl
    def wrap_companion(self, state: State, companion: nn.Module) -> nn.Module:
        return companion.to(state.device)

    @hookimpl
    def build_optimizers(self, state: State) -> dict[str, Optimizer]:
        return {}

    @hookimpl
    def build_train_dataloader(self, state: State) -> NoData | tuple[()]:
        brings_data = any(state.owner(action) != "core" for action in ("forward", "train_batch"))
        # Without a data loader an epoch has no end, so a run counted in epochs would never finish.
        in_epochs = state.duration is not None and state.duration.unit == "ep"
        return NoData() if brings_data and not in_epochs else ()

    @hookimpl
    def build_eval_dataloaders(self, state: State) -> dict[str, Any]:
        return {}

    @hookimpl
    def build_schedulers(self, state: State) -> dict[str, Any]:
        return {}

    @hookimpl
    def build_metrics(self, state: State, dataset: str) -> dict[str, Metric]:
        return {}

    @hookimpl
    def restore_model(self, state: State, weights: Mapping[str, Tensor], strict: bool) -> bool:
        state.model.load_state_dict(fit_to_load(weights, state.model), strict=strict)
        return True

    @hookimpl
    def restore_optimizers(self, state: State, states: Mapping[str, dict[str, Any]]) -> bool:
        for name, optimizer in state.optimizers.items():
            # An optimizer that overrides `state_dict` may save any format; only its own code can check it.
            if type(optimizer).state_dict is Optimizer.state_dict:
                require_optimizer(optimizer, states[name])
            optimizer.load_state_dict(states[name])
        return True

    @hookimpl
    def count_batch(self, state: State, batch: Any) -> Count:
        if state.train_dataloader is not self._counted_dataloader:
            self._counted_dataloader = state.train_dataloader
            self._num_samples = loader_of(state.train_dataloader).num_samples
        samples = self._num_samples(batch)
        if self._latest_count.samples != samples:
            self._latest_count = Count(samples, 0)
        return self._latest_count

    @hookimpl
    def weigh_microbatch(self, state: State) -> float | Tensor:
        tokens = num_tokens(state) if self._traits_of(state).weighs_tokens else None
        return state.current_count().samples if tokens is None else tokens

    @hookimpl
    def split_batch(self, state: State) -> Sequence[Any]:
        size = state.microbatch_size
        # This runs for each batch: comparing the class is cheaper than a call of isinstance.
        if state.batch.__class__ is Microbatches:
            requested_size = state.settings.microbatch_size
            if requested_size is not None:
                raise TaskError(
                    f"microbatch_size is {requested_size}, but the batch is "
                    f"{batches.describe(state.batch)}, which are trained on as they are",
                    fix="unset microbatch_size, and let the data loader make smaller microbatches",
                )
            return state.batch.parts
        if size is None:
            return [state.batch]
        return loader_of(state.train_dataloader).split(state.batch, size)

    @hookimpl
    def forward(self, state: State) -> Any:
        batch = state.microbatch
        model = state.wrapped_model
        if batch is None:
            batch = state.batch
            model = state.model
        try:
            if batches.is_pair(batch):
                return model(batch[0])
            if isinstance(batch, Mapping):
                traits = self._traits_of(state)
                if batches.LABELS in batch and not traits.takes_labels:
                    batch = {key: value for key, value in batch.items() if key != batches.LABELS}
                # A cache of keys and values takes memory, and is of use only in generation.
                return model(**{"use_cache": False, **batch} if traits.keeps_cache else batch)
            # Only a prediction can do without targets.
            if state.microbatch is None and state.eval_name is None and batches.is_inputs(batch):
                return model(batches.inputs_of(batch))
        except Exception as error:
            if isinstance(error, TypeError) and isinstance(batch, Mapping):
                _explain_keywords(error, state.model, batch)
            note_input(error, "forward", state)
            raise
        of_set = "" if state.eval_name is None else f" of the eval set {state.eval_name!r}"
        raise TaskError(
            f"a batch{of_set} of {batches.describe(batch)} can't be split into inputs and targets",
            fix="let the data loader give pairs (inputs, targets) or mappings, "
            "or give Task(forward=lambda model, batch: ...), which returns the outputs, or "
            "{'loss': ..., 'logits': ...} where the loss needs more than outputs and targets",
        )

    def _has_hooks_after_forward(self) -> bool:
        """Returns whether plugins or the task may read the outputs during the backward pass."""
        for hook in _HOOKS_AFTER_FORWARD:
            for implementation in self._active.assembly.implementations[hook]:
                role = implementation.plugin.role
                # The task's loss receives the outputs as an argument and returns before `backward`.
                # Any other implementation may register a tensor hook that reads `state.outputs`.
                if role != "core" and not (role == "task" and hook == "loss"):
                    return True
        return False

    def _traits_of(self, state: State) -> _ModelTraits:
        """Returns how to call the model; inspects each class of models once."""
        model = state.model
        if self._traits[0] is not type(model):
            traits = _ModelTraits(
                takes_labels=may_take(model, batches.LABELS),
                weighs_tokens=may_weigh_tokens(state),
                keeps_cache=keeps_cache(model),
            )
            self._traits = type(model), traits
        return self._traits[1]

    @hookimpl
    def loss(self, state: State) -> Tensor:
        loss = loss_in(state.outputs)
        if loss is None:
            kind = type(state.outputs).__name__
            raise TaskError(
                f"the task has no loss, and the model's {kind} has no .loss",
                fix="set a loss, for example Task(loss=torch.nn.functional.cross_entropy)",
            )
        return loss  # type: ignore[no-any-return]

    @hookimpl
    def backward(self, state: State, loss: Tensor) -> bool:
        if not isinstance(loss, Tensor) or loss.ndim:
            raise _no_scalar(loss)
        if not self._outputs_are_needed:
            # Large outputs such as logits would otherwise stay in memory beside the gradients.
            state.outputs = None
        try:
            state.precision.backward(loss)
        except RuntimeError as error:
            if loss.requires_grad:
                raise
            raise TaskError(
                "the loss depends on no trainable parameter, so it has no gradient",
                fix="compute the loss from the model's outputs without .detach(), .item() or "
                "torch.no_grad(), and leave at least one of its parameters unfrozen",
            ) from error
        return True

    @hookimpl
    def clip_gradients(
        self, state: State, optimizers: Mapping[str, Optimizer]
    ) -> dict[str, Tensor]:
        settings = state.settings
        is_bounded = settings.clip_norm is not None or settings.clip_value is not None
        return self._clip(state, optimizers) if is_bounded else {}

    @hookimpl
    def optimizer_step(
        self, state: State, optimizers: Mapping[str, Optimizer], closure: Callable[[], Tensor]
    ) -> bool | StepOutcome:
        stepped: bool | StepOutcome = True
        for name, optimizer in optimizers.items():
            if name in self._with_closure:
                # LBFGS calls its closure before it changes a weight, so the first call can return the
                # loss computed already. Other optimizers may change weights first.
                argument: Callable[[], Tensor] = closure
                if isinstance(optimizer, LBFGS):
                    argument = _ClosureWithLoss(closure, self._mean, state.loss)
                optimizer.step(argument)  # type: ignore[arg-type]  # torch's stub says float
            else:
                stepped = state.precision.step(optimizer)
        return stepped

    @hookimpl
    def zero_grad(self, state: State, optimizers: Mapping[str, Optimizer]) -> bool:
        for optimizer in optimizers.values():
            drop_gradients(optimizer)
        return True

    @hookimpl
    def scheduler_step(self, state: State, interval: str) -> bool:
        for name, scheduler in state.schedulers.get(interval, ()):
            try:
                scheduler.step()
            except ValueError as error:  # raised by OneCycleLR after its last step
                error.add_note(
                    f"raised by the {type(scheduler).__name__} of the optimizer {name!r}, which was "
                    f"created for a run of {state.duration}\n"
                    "  fix  use a scheduler without an end, or one of eventloop.schedules"
                )
                raise
        return True

    @hookimpl
    def eval_batches(self, state: State, dataloader: Any) -> Any:
        return dataloader

    @hookimpl
    def eval_forward(self, state: State) -> Any:
        return self._active.plans.forward(state)

    @hookimpl
    def predict_forward(self, state: State) -> Any:
        return self._active.plans.forward(state)

    @hookimpl
    def update_metrics(self, state: State, metrics: Mapping[str, Metric]) -> bool:
        if metrics:
            # A metric may store predictions until the end of the epoch; with their graph they would
            # keep the activations of every batch in memory.
            predicted = batches.map_tensors(_detached, predictions(state.outputs))
            targets = state.targets
            for name, metric in metrics.items():
                try:
                    metric.update(predicted, targets)
                except Exception as error:
                    note_input(error, f"metric {name!r}", state)
                    raise
        return True

    @hookimpl
    def capture_model(self, state: State) -> dict[str, Tensor]:
        return {name: slice_of(value) for name, value in state.model.state_dict().items()}

    @hookimpl
    def select_weights(self, state: State, names: Sequence[str]) -> Sequence[str]:
        return names

    @hookimpl
    def capture_optimizers(self, state: State) -> dict[str, dict[str, Any]]:
        return {
            name: sliced(optimizer.state_dict()) for name, optimizer in state.optimizers.items()
        }

    @hookimpl
    def export(self, state: State, path: Path) -> Path:
        return export(state, self._active.plans.capture_model(state), path)


def _detached(value: Any) -> Any:
    return value.detach() if hasattr(value, "detach") else value


class _ClosureWithLoss:
    """A closure whose first call returns the loss that was computed before the step.

    Args:
        closure: computes loss and gradients again.
        mean: returns the mean of a loss over the ranks.
        loss: the batch's loss, shape (); its gradients are in `.grad`.
    """

    def __init__(
        self, closure: Callable[[], Tensor], mean: Callable[[Tensor], Tensor], loss: Tensor | None
    ) -> None:
        self._closure = closure
        self._mean = mean
        self._loss = loss

    def __call__(self) -> Tensor:
        """Returns the loss; its gradients are in `.grad`."""
        loss = self._loss
        self._loss = None
        return self._closure() if loss is None else self._mean(loss)


def _no_scalar(loss: object) -> TaskError:
    if isinstance(loss, Tensor):
        return TaskError(
            f"the loss is not a scalar but {tuple(loss.shape)}",
            fix="return the mean over the batch: reduction='mean', or .mean()",
        )
    return TaskError(
        f"the loss is not a scalar but {a(type(loss).__name__)}, which has no gradient",
        fix="return a tensor of shape (), without .item() or float()",
    )


def _explain_keywords(error: TypeError, model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Adds a note on how a mapping is passed, if its keys don't fit the model's `forward`."""
    signature = inspect.signature(model.forward)
    try:
        signature.bind(**batch)
    except TypeError:
        accepted_keys, other_keys = keys_of(model, batch)
        input_key = [*accepted_keys, *other_keys, batches.LABELS][0]
        error.add_note(
            f"a batch that is a mapping is passed as model(**batch), here with {', '.join(batch)}; "
            f"forward takes {', '.join(signature.parameters)}\n"
            "  fix  take the other keys out of the batch, the targets as 'labels', or give "
            f"Task(forward=lambda model, batch: model(batch[{input_key!r}]))"
        )


def keys_of(model: nn.Module, batch: Any) -> tuple[list[str], list[str]]:
    """Returns the keys of a mapping that a model's `forward` accepts, and the other keys.

    Neither list contains "labels".
    """
    keys = [key for key in batch if key != batches.LABELS] if isinstance(batch, Mapping) else []
    accepted_keys = [key for key in keys if may_take(model, key)]
    return accepted_keys, [key for key in keys if key not in accepted_keys]
