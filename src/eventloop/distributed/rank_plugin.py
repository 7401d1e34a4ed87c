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
        self._seen_whole: set[str] = set()
        self._split_themselves: dict[str, bool] = {}
        self._lengths: dict[str, Any] = {}

    @hookimpl
    def header_note(self) -> str:
        """Returns the header's note on data that eventloop can't shard."""
        names = [name for name, does in self._split_themselves.items() if does]
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
        # Before any plugin shards or copies them.
        shapes = [
            f"{name} {str(one.dtype).removeprefix('torch.')}{list(one.shape)}"
            for name, one in state.model.state_dict().items()
            if isinstance(one, Tensor)
        ]
        named = {str(idx): one for idx, one in enumerate(shapes)}
        require_same(self._processes, "models", named, by_part=True)
        if state.settings.sync_batch_norm and state.data_world_size > 1:
            state.model = with_shared_batch_norm(state.model, state.data_group)
        return (yield)

    @hookimpl(wrapper=True)
    def build_train_dataloader(self, state: State) -> Any:
        dataloader = yield
        self._split_themselves["train"] = loader_of(dataloader).may_shard_itself
        self._lengths |= lengths_of("train", dataloader)
        return loader_of(dataloader).training_shard(state)

    @hookimpl(wrapper=True)
    def build_eval_dataloaders(self, state: State) -> Any:
        dataloaders = yield
        shards = {}
        self._seen_whole = set()
        for name, dataloader in dataloaders.items():
            loader = loader_of(dataloader)
            shards[name] = loader.evaluation_shard(state)
            if loader.is_smaller_than(state.data_world_size):
                self._seen_whole.add(f"eval/{name}")
            self._split_themselves[f"eval/{name}"] = loader.may_shard_itself
            self._lengths |= lengths_of(f"eval/{name}", dataloader)
        return shards

    @hookimpl(wrapper=True)
    def build_metrics(self, state: State, dataset: str) -> Any:
        metrics = yield
        for _, metric in metric_parts(metrics):
            if self._processes.data_group is not None:
                metric.process_group = self._processes.data_group
            if dataset in self._seen_whole:  # every rank counts every sample
                metric.distributed_available_fn = _alone
            elif not any(isinstance(one, list) for one in metric.metric_state.values()):
                metric.dist_sync_fn = _gathered_alike
        return metrics

    @hookimpl
    def after_load(self, state: State) -> None:
        # All is built and loaded, and no step has been made.
        modes = {"precision": state.precision.name, "device": state.device.type}
        require_same(self._processes, "precisions or devices", modes)
        require_same(self._processes, "optimizers", optimizers_of(state), by_part=True)
        require_same(self._processes, "schedules", schedules_of(state), by_part=True)
        require_same(self._processes, "data", self._lengths)

    @hookimpl(wrapper=True)
    def forward(self, state: State) -> Generator[None, Any, Any]:
        # Only the last backward of a batch exchanges gradients; that of a closure, too.
        if isinstance(state.wrapped_model, DistributedDataParallel):
            is_last = state.microbatch_idx == state.num_microbatches - 1
            state.wrapped_model.require_backward_grad_sync = is_last
        return (yield)

    @hookimpl(wrapper=True)
    def backward(self, state: State) -> Generator[None, bool, bool]:
        done = yield
        is_last = state.microbatch_idx == state.num_microbatches - 1
        if is_last and self._processes.averages_in_backward:
            average_gradients(self._processes, state, state.optimizers)
        return done

    @hookimpl(wrapper=True)
    def evaluate(self, state: State) -> Any:
        results = yield
        self._processes.exchange.settle(state)  # what the results had plugins ask for
        return results

    @hookimpl
    def epoch_checkpoint(self, state: State) -> None:
        self._processes.exchange.settle(state)

    @hookimpl(wrapper=True)
    def save_checkpoint(self, state: State) -> Any:
        self._processes.exchange.settle(state)  # a run that is resumed wouldn't ask for it again
        return (yield)

    @hookimpl
    def eval_before_all(self, state: State) -> None:
        # Each rank evaluates with buffers of its own: all take those that rank 0 would save.
        take_from_first(state.model, self._processes.data_group, buffers_alone=True)


def _require_shapes(model: nn.Module) -> None:
    for name, one in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(one):
            raise TaskError(
                f"the shape of {name!r} isn't known before the first batch, but the ranks have to "
                "agree on it before",
                fix="give the layer its sizes, nn.Linear(8, 3), or let the function that makes the "
                "model call it once: `model(example)`",
            )


def _alone() -> bool:
    return False


def _gathered_alike(tensor: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Gathers a state with the same shape on all ranks, without exchanging shapes first."""
    of_ranks = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(of_ranks, tensor.contiguous(), group=group)
    return of_ranks
