"""The core's own plugin: the default answer to every action and question that has one.

`train_batch`, `evaluate` and `predict`, whose defaults are parts of the loop, are in `loop.py`.
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

_LATE = ("before_loss", "loss", "after_loss", "before_backward", "backward", "after_backward")


class _Known(NamedTuple):
    takes_labels: bool
    weighs_tokens: bool
    keeps_cache: bool


class Defaults:
    """Answers every action that neither a plugin nor the task answers.

    Args:
        active: the plugins of the run, and the plans for defaults that are other actions.
        wrap: puts the model into what several processes need.
        mean: returns the mean of a loss over the ranks.
    """

    __slots__ = (
        "_active",
        "_clip",
        "_count",
        "_counted_dataloader",
        "_following",
        "_is_watched",
        "_known",
        "_mean",
        "_num_samples",
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
        self._is_watched = True
        self._wrap = wrap
        self._mean = mean
        self._clip = GradientClipping()
        self._with_closure: frozenset[str] = frozenset()
        self._following: tuple[FollowsMetric, ...] = ()
        self._count = Count(0, 0)
        self._counted_dataloader: Any = None
        self._num_samples: Callable[[Any], int] = batches.num_samples
        self._known: tuple[type | None, _Known] = (None, _Known(True, False, False))

    @hookimpl
    def after_load(self, state: State) -> None:
        named = state.optimizers.items()
        self._with_closure = frozenset(name for name, one in named if wants_closure(one))
        schedulers = [one for pairs in state.schedulers.values() for _, one in pairs]
        self._following = tuple(one for one in schedulers if isinstance(one, FollowsMetric))
        for scheduler in self._following:
            scheduler.begin(state)
        self._known_of(state)  # within a compiled region it would be compiled twice
        hooked = self._active.assembly.implementations
        late = [one for hook in _LATE for one in hooked[hook] if one.plugin.role != "core"]
        # A plugin may register a tensor hook there that reads the outputs; a task's loss has them.
        self._is_watched = any(one.plugin.role != "task" or one.hook.name != "loss" for one in late)

    @hookimpl
    def eval_after_all(self, state: State) -> None:
        for scheduler in self._following:
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
        owned = any(state.owner(action) != "core" for action in ("forward", "train_batch"))
        # Nothing would end an epoch.
        in_epochs = state.duration is not None and state.duration.unit == "ep"
        return NoData() if owned and not in_epochs else ()

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
            if type(optimizer).state_dict is Optimizer.state_dict:  # another's form only it knows
                require_optimizer(optimizer, states[name])
            optimizer.load_state_dict(states[name])
        return True

    @hookimpl
    def count_batch(self, state: State, batch: Any) -> Count:
        if state.train_dataloader is not self._counted_dataloader:
            self._counted_dataloader = state.train_dataloader
            self._num_samples = loader_of(state.train_dataloader).num_samples
        samples = self._num_samples(batch)
        if self._count.samples != samples:
            self._count = Count(samples, 0)
        return self._count

    @hookimpl
    def weigh_microbatch(self, state: State) -> float | Tensor:
        tokens = num_tokens(state) if self._known_of(state).weighs_tokens else None
        return state.current_count().samples if tokens is None else tokens

    @hookimpl
    def split_batch(self, state: State) -> Sequence[Any]:
        size = state.microbatch_size
        if state.batch.__class__ is Microbatches:  # asked for each batch: no call
            if (asked := state.settings.microbatch_size) is not None:
                raise TaskError(
                    f"microbatch_size is {asked}, but the batch is {batches.describe(state.batch)}, "
                    "which are trained on as they are",
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
                known = self._known_of(state)
                if batches.LABELS in batch and not known.takes_labels:
                    batch = {key: one for key, one in batch.items() if key != batches.LABELS}
                return model(**{"use_cache": False, **batch} if known.keeps_cache else batch)
            if state.microbatch is None and state.eval_name is None and batches.is_inputs(batch):
                return model(batches.inputs_of(batch))  # to predict for takes no targets
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

    def _known_of(self, state: State) -> _Known:
        """Returns what is known of the model; each class is looked at once."""
        model = state.model
        if self._known[0] is not type(model):
            facts = may_take(model, batches.LABELS), may_weigh_tokens(state), keeps_cache(model)
            self._known = type(model), _Known(*facts)
        return self._known[1]

    @hookimpl
    def loss(self, state: State) -> Tensor:
        if (found := loss_in(state.outputs)) is None:
            kind = type(state.outputs).__name__
            raise TaskError(
                f"the task has no loss, and the model's {kind} has no .loss",
                fix="give Task(loss=torch.nn.functional.cross_entropy), say",
            )
        return found  # type: ignore[no-any-return]

    @hookimpl
    def backward(self, state: State, loss: Tensor) -> bool:
        if not isinstance(loss, Tensor) or loss.ndim:
            raise _no_scalar(loss)
        if not self._is_watched:
            state.outputs = None  # large ones, logits, needn't lie beside the gradients
        try:
            state.precision.backward(loss)
        except RuntimeError as error:
            if loss.requires_grad:
                raise
            raise TaskError(
                "the loss depends on no parameter that is trained: it has no gradient",
                fix="let the model's outputs reach the loss without .detach(), .item() or "
                "torch.no_grad(), and leave parameters unfrozen",
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
                first = _FirstKnown(closure, self._mean, state.loss)
                # torch's LBFGS asks before it moves a weight; of others that isn't known.
                argument = first if isinstance(optimizer, LBFGS) else closure
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
            except ValueError as error:  # OneCycleLR's, beyond its end
                error.add_note(
                    f"raised by the {type(scheduler).__name__} of the optimizer {name!r}, which was "
                    f"made for a run of {state.duration}\n"
                    "  fix  take a scheduler without an end, or one of eventloop.schedules"
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
            found = predictions(state.outputs)  # a metric may keep it, but not its graph
            predicted = batches.map_tensors(
                lambda one: getattr(one, "detach", lambda: one)(), found
            )
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
        return {name: slice_of(one) for name, one in state.model.state_dict().items()}

    @hookimpl
    def select_weights(self, state: State, names: Sequence[str]) -> Sequence[str]:
        return names

    @hookimpl
    def capture_optimizers(self, state: State) -> dict[str, dict[str, Any]]:
        return {name: sliced(one.state_dict()) for name, one in state.optimizers.items()}

    @hookimpl
    def export(self, state: State, path: Path) -> Path:
        return export(state, self._active.plans.capture_model(state), path)


class _FirstKnown:
    """The closure of a step; its first call returns the loss that the passes have computed.

    Args:
        closure: computes loss and gradients again.
        mean: returns the mean of a loss over the ranks.
        loss: of the batch, whose gradients are in place.
    """

    def __init__(
        self, closure: Callable[[], Tensor], mean: Callable[[Tensor], Tensor], loss: Tensor | None
    ) -> None:
        self._closure = closure
        self._mean = mean
        self._loss = loss

    def __call__(self) -> Tensor:
        """Returns the loss, with the gradients in place."""
        loss = self._loss
        self._loss = None
        return self._closure() if loss is None else self._mean(loss)


def _no_scalar(loss: object) -> TaskError:
    if isinstance(loss, Tensor):
        return TaskError(
            f"the loss is not a scalar but {tuple(loss.shape)}",
            fix="give a loss that is the mean over the batch: reduction='mean', or .mean()",
        )
    return TaskError(
        f"the loss is not a scalar but {a(type(loss).__name__)}, which has no gradient",
        fix="give a tensor of shape (), without .item() or float()",
    )


def _explain_keywords(error: TypeError, model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Notes on an error how a mapping becomes arguments, where they don't fit the model."""
    signature = inspect.signature(model.forward)
    try:
        signature.bind(**batch)
    except TypeError:
        taken, left = keys_of(model, batch)
        error.add_note(
            f"a batch that is a mapping is passed as model(**batch), here with {', '.join(batch)}; "
            f"forward takes {', '.join(signature.parameters)}\n"
            "  fix  take the other keys out of the batch, the targets as 'labels', or give "
            f"Task(forward=lambda model, batch: model(batch[{[*taken, *left, 'labels'][0]!r}]))"
        )


def keys_of(model: nn.Module, batch: Any) -> tuple[list[str], list[str]]:
    """Returns the keys of a mapping that a model's `forward` takes, and the others but "labels"."""
    keys = [key for key in batch if key != batches.LABELS] if isinstance(batch, Mapping) else []
    taken = [key for key in keys if may_take(model, key)]
    return taken, [key for key in keys if key not in taken]
