"""The core's plugin for training with several ranks."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from eventloop.data.loaders import loader_of
from eventloop.distributed.collectives import (
    average_gradients,
    take_from_first,
    with_shared_batch_norm,
)
from eventloop.distributed.consistency import lengths_of, optimizers_of, require_same, schedules_of
from eventloop.errors import TaskError
from eventloop.hook_markers import hookimpl
from eventloop.training.metrics import metric_parts

if TYPE_CHECKING:
    from eventloop.distributed.data_parallel import DataParallel
    from eventloop.state import State


class RankHooks:
    """Shards the data over ranks, and decides when gradients and buffers are synchronised."""

    def __init__(self, processes: DataParallel) -> None:
        self._processes = processes
        self._unsharded_sets: set[str] = set()  # eval sets that every rank evaluates as a whole
        self._may_shard_itself: dict[str, bool] = {}
        self._lengths: dict[str, Any] = {}

    @hookimpl
    def header_note(self) -> str:
        """Returns the header's note about data that eventloop can't shard; "" if it shards all data."""
        may_shard = self._may_shard_itself.items()
        names = [name for name, may_shard_itself in may_shard if may_shard_itself]
        if not names or self._processes.data_world_size == 1:
            return ""
        return (
            f"data: eventloop can't split {', '.join(names)} over the ranks; unless the data set "
            "does, all ranks see the same samples: let it yield `itertools.islice(samples, "
            "state.data_rank, None, state.data_world_size)`, with the `state` that "
            "Task(train_dataloader=lambda state: ...) takes"
        )

    @hookimpl(wrapper=True)
    def wrap_model(self, state: State) -> Any:
        _require_shapes(state.model)
        # Before the inner implementations, which may shard the parameters or copy them between ranks:
        # with different models, that would hang or fail without naming the parameter.
        shapes = []
        for name, tensor in state.model.state_dict().items():
            if isinstance(tensor, Tensor):
                dtype = str(tensor.dtype).removeprefix("torch.")
                shapes.append(f"{name} {dtype}{list(tensor.shape)}")
        shape_by_idx = {str(idx): shape for idx, shape in enumerate(shapes)}
        require_same(self._processes, "models", shape_by_idx, by_part=True)
        if state.settings.sync_batch_norm and state.data_world_size > 1:
            state.model = with_shared_batch_norm(state.model, state.data_group)
        return (yield)

    @hookimpl(wrapper=True)
    def build_train_dataloader(self, state: State) -> Any:
        dataloader = yield
        self._may_shard_itself["train"] = loader_of(dataloader).may_shard_itself
        self._lengths |= lengths_of("train", dataloader)
        return loader_of(dataloader).training_shard(state)

    @hookimpl(wrapper=True)
    def build_eval_dataloaders(self, state: State) -> Any:
        dataloaders = yield
        shards = {}
        self._unsharded_sets = set()
        for name, dataloader in dataloaders.items():
            loader = loader_of(dataloader)
            shards[name] = loader.evaluation_shard(state)
            if loader.is_smaller_than(state.data_world_size):
                self._unsharded_sets.add(f"eval/{name}")
            self._may_shard_itself[f"eval/{name}"] = loader.may_shard_itself
            self._lengths |= lengths_of(f"eval/{name}", dataloader)
        return shards

    @hookimpl(wrapper=True)
    def build_metrics(self, state: State, dataset: str) -> Any:
        metrics = yield
        for _, metric in metric_parts(metrics):
            if self._processes.data_group is not None:
                metric.process_group = self._processes.data_group
            if dataset in self._unsharded_sets:
                # Every rank counts every sample: adding up the ranks would count each several times.
                metric.distributed_available_fn = _never_distributed
            elif not any(isinstance(tensor, list) for tensor in metric.metric_state.values()):
                metric.dist_sync_fn = _gather_equal_shapes
        return metrics

    @hookimpl
    def after_load(self, state: State) -> None:
        # By now everything is built and loaded, and no rank has trained a batch.
        modes = {"precision": state.precision.name, "device": state.device.type}
        require_same(self._processes, "precisions or devices", modes)
        require_same(self._processes, "optimizers", optimizers_of(state), by_part=True)
        require_same(self._processes, "schedules", schedules_of(state), by_part=True)
        require_same(self._processes, "data", self._lengths)

    @hookimpl(wrapper=True)
    def forward(self, state: State) -> Generator[None, Any, Any]:
        # DDP exchanges gradients only in the backward pass of a batch's last microbatch. DDP reads the
        # flag in its forward, and a closure repeats forward passes, so it is set before each.
        if isinstance(state.wrapped_model, DistributedDataParallel):
            is_last = state.microbatch_idx == state.num_microbatches - 1
            state.wrapped_model.require_backward_grad_sync = is_last
        return (yield)

    @hookimpl(wrapper=True)
    def backward(self, state: State) -> Generator[None, bool, bool]:
        result = yield
        is_last = state.microbatch_idx == state.num_microbatches - 1
        if is_last and self._processes.averages_in_backward:
            average_gradients(self._processes, state, state.optimizers)
        return result

    @hookimpl(wrapper=True)
    def evaluate(self, state: State) -> Any:
        results = yield
        self._processes.exchange.settle(
            state
        )  # plugins may request a stop or a checkpoint for a result
        return results

    @hookimpl
    def epoch_checkpoint(self, state: State) -> None:
        self._processes.exchange.settle(state)

    @hookimpl(wrapper=True)
    def save_checkpoint(self, state: State) -> Any:
        self._processes.exchange.settle(
            state
        )  # pending requests aren't saved, so a resumed run would lose them
        return (yield)

    @hookimpl
    def eval_before_all(self, state: State) -> None:
        # Buffers differ between ranks, such as statistics of batch norms. All ranks evaluate with the
        # buffers of rank 0, which are also the ones that a checkpoint contains.
        take_from_first(state.model, self._processes.data_group, buffers_alone=True)


def _require_shapes(model: nn.Module) -> None:
    """Raises TaskError if a parameter or buffer of the model is lazy, without a shape."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise TaskError(
                f"the shape of {name!r} isn't known before the first batch, but ranks compare the "
                "shapes before training",
                fix="give the layer its sizes, nn.Linear(8, 3), or call the model once in the function "
                "that builds it: `model(example)`",
            )


def _never_distributed() -> bool:
    """Makes torchmetrics compute a metric from this rank's state only."""
    return False


def _gather_equal_shapes(tensor: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Gathers a state with the same shape on all ranks, without exchanging shapes first.

    torchmetrics' own function adds a barrier and a gather of the shapes for each state of a metric.
    """
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor.contiguous(), group=group)
    return gathered
