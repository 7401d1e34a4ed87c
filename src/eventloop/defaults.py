"""The core's own plugin: the default answer to every action and question that has one.

`train_batch`, `evaluate` and `predict`, whose defaults are parts of the loop, are in `loop.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from eventloop import data
from eventloop.data import Count
from eventloop.errors import TaskError
from eventloop.hooks import hookimpl
from eventloop.metrics import predictions

if TYPE_CHECKING:
    from eventloop.plugin.freeze import Plans
    from eventloop.state import State


class Defaults:
    """Answers every action that neither a plugin nor the task answers.

    Args:
        plans: the plans of the run, for defaults that are other actions.
        wrap: puts the model into what several processes need.
    """

    def __init__(self, plans: Plans, wrap: Callable[[nn.Module], nn.Module]) -> None:
        self._plans = plans
        self._wrap = wrap

    @hookimpl
    def build_model(self, state: State) -> nn.Module:
        raise TaskError("the task has no model", fix="give Task(model=...) or build_model")

    @hookimpl
    def wrap_model(self, state: State) -> nn.Module:
        return self._wrap(state.model)

    @hookimpl
    def build_optimizers(self, state: State) -> dict[str, Optimizer]:
        return {}

    @hookimpl
    def build_train_dataloader(self, state: State) -> tuple[()]:
        return ()

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
        state.model.load_state_dict(weights, strict=strict)
        return True

    @hookimpl
    def restore_optimizers(self, state: State, states: Mapping[str, dict[str, Any]]) -> bool:
        for name, optimizer in state.optimizers.items():
            optimizer.load_state_dict(states[name])
        return True

    @hookimpl
    def count_batch(self, state: State, batch: Any) -> Count:
        samples = data.num_samples(batch)
        return Count(samples, 0, samples)

    @hookimpl
    def split_batch(self, state: State) -> Sequence[Any]:
        size = state.settings.microbatch_size
        return [state.batch] if size is None else data.split(state.batch, size)

    @hookimpl
    def forward(self, state: State) -> Any:
        batch = state.batch if state.microbatch is None else state.microbatch
        if data.is_pair(batch):
            return state.wrapped_model(batch[0])
        if isinstance(batch, Mapping):
            return state.wrapped_model(**batch)
        raise TaskError(
            f"a batch of {data.describe(batch)} can't be split into inputs and targets",
            fix="let the data loader give pairs (inputs, targets) or mappings, "
            "or give Task(forward=lambda model, batch: ...)",
        )

    @hookimpl
    def loss(self, state: State) -> Tensor:
        outputs = state.outputs
        found = outputs.get("loss") if isinstance(outputs, Mapping) else _loss_of(outputs)
        if found is None:
            raise TaskError(
                f"the task has no loss, and the model's {type(outputs).__name__} has no .loss",
                fix="give Task(loss=torch.nn.functional.cross_entropy), say",
            )
        return found

    @hookimpl
    def backward(self, state: State, loss: Tensor) -> bool:
        if not isinstance(loss, Tensor) or loss.ndim:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise TaskError(
                f"the loss is no scalar but {shape}",
                fix="give a loss that is the mean over the batch: reduction='mean', or .mean()",
            )
        state.precision.backward(loss)
        return True

    @hookimpl
    def clip_gradients(
        self, state: State, optimizers: Mapping[str, Optimizer]
    ) -> dict[str, Tensor]:
        settings = state.settings
        if settings.clip_norm is None and settings.clip_value is None:
            return {}
        params = [
            param
            for optimizer in optimizers.values()
            for group in optimizer.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        logged = {}
        if settings.clip_norm is not None:
            logged["grad_norm"] = nn.utils.clip_grad_norm_(params, settings.clip_norm)
        if settings.clip_value is not None:
            nn.utils.clip_grad_value_(params, settings.clip_value)
        return logged

    @hookimpl
    def optimizer_step(
        self,
        state: State,
        optimizers: Mapping[str, Optimizer],
        closure: Callable[[], Tensor],
    ) -> bool:
        for optimizer in optimizers.values():
            optimizer.step()
        return True

    @hookimpl
    def zero_grad(self, state: State, optimizers: Mapping[str, Optimizer]) -> bool:
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        return True

    @hookimpl
    def scheduler_step(self, state: State, interval: str) -> bool:
        for _, scheduler in state.schedulers.get(interval, ()):
            scheduler.step()
        return True

    @hookimpl
    def eval_forward(self, state: State) -> Any:
        return self._plans.forward(state)

    @hookimpl
    def predict_forward(self, state: State) -> Any:
        return self._plans.forward(state)

    @hookimpl
    def update_metrics(self, state: State, metrics: Mapping[str, Metric]) -> bool:
        if metrics:
            given = predictions(state.outputs)
            targets = state.targets
            for metric in metrics.values():
                metric.update(given, targets)
        return True

    @hookimpl
    def capture_model(self, state: State) -> dict[str, Tensor]:
        return state.model.state_dict()

    @hookimpl
    def capture_optimizers(self, state: State) -> dict[str, dict[str, Any]]:
        return {name: optimizer.state_dict() for name, optimizer in state.optimizers.items()}

    @hookimpl
    def export(self, state: State, path: Path) -> Path:
        weights = self._plans.capture_model(state)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: weight.detach().cpu().contiguous().clone()
                   for name, weight in weights.items()}, path)  # fmt: skip
        return path


def _loss_of(outputs: Any) -> Tensor | None:
    return getattr(outputs, "loss", None)
