"""Data-parallel training with torch's DDP: one process per device, gradients averaged.

Started by torchrun, or by another launcher that sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT.
"""

from __future__ import annotations

import atexit
import copy
import functools
import gc
import hashlib
import json
import os
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pickle import dumps
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import (  # type: ignore[attr-defined]  # public, not in __all__
    PrefixStore,
    rendezvous,
)
from torch.nn.functional import embedding
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from eventloop.devices import collective_backends, kind_of
from eventloop.distributed.answers import answers_of
from eventloop.distributed.checkpoint_crew import Crew, CrewOfRanks
from eventloop.distributed.collectives import ExchangeOfRanks, average_gradients, take_from_first
from eventloop.distributed.consistency import require_same_weights
from eventloop.distributed.loopback import host_on_loopback, stay_on_loopback
from eventloop.distributed.processes import (
    WHOLE,
    LossWeights,
    Parts,
    Processes,
    WeighMicrobatch,
    Weight,
    weights_of,
)
from eventloop.distributed.rank_plugin import RankHooks
from eventloop.distributed.rank_store import attempt, bulletin, is_host_of_store, timeout_s
from eventloop.distributed.thread_location import wait_for
from eventloop.distributed.watchdog import watched
from eventloop.errors import EventloopError, PluginError, SettingError, TaskError
from eventloop.fixes import as_set
from eventloop.mesh import Layout
from eventloop.training.logged_numbers import Share, mean
from eventloop.training.running_means import on_device
from eventloop.training.sharded_tensors import sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from eventloop.config.settings import Settings
    from eventloop.plugin.plans import ActivePlugins
    from eventloop.state import State
    from eventloop.training.logged_numbers import Cell, OverRanks, Reduce, Reduction, Row, Shares
    from eventloop.training.running_means import Number


# A logged number that ranks reduce: row, name, reduction, and number of summands.
_CellSignature = tuple[int, str, "Reduction", int]


class DataParallel(Processes):
    """One of several ranks, which train on different data and average their gradients.

    Args:
        groups: the process groups created so far, by purpose. No other object may refer to the groups,
            as they are destroyed when this dict is cleared.

    Attributes:
        is_strategy: whether DDP or this class averages gradients, rather than a plugin's strategy.
        averages_in_backward: whether `RankHooks` averages gradients after the last backward pass of a
            batch, since DDP doesn't support the model.
    """

    def __init__(self, groups: dict[object, dist.ProcessGroup]) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.layout = Layout({"data": self.world_size})
        self.data_rank = self.rank
        self.data_world_size = self.world_size
        self._device_type = "cpu"
        self.exchange: ExchangeOfRanks = ExchangeOfRanks(self)
        self._groups = groups
        self.is_strategy = self.averages_in_backward = False

    @property
    def host(self) -> dist.ProcessGroup:
        """The gloo group for values on the host."""
        return self._groups["host"]

    @property
    def aside(self) -> dist.ProcessGroup:
        """A group of the default backend, for sums that mustn't queue behind gradients."""
        return self._groups["aside"]

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        return self._groups[repr(self.layout)] if self.data_world_size < self.world_size else None

    def arrange(self, layout: Layout, device: torch.device) -> None:
        is_layout = isinstance(layout, Layout) and layout.world_size == self.world_size
        if not self.are_same(repr(layout)) or not is_layout:
            raise PluginError(
                f"on rank {self.rank} of {self.world_size} build_mesh returned {layout!r}",
                fix="return a Layout whose sizes multiply to state.world_size, alike on all ranks",
            )
        self.layout = layout
        self._device_type = device.type
        self.data_rank = layout.data_rank(self.rank)
        self.data_world_size = layout.data_world_size
        if (board := bulletin()) is not None:
            board.layout = layout
        if layout.data_world_size < self.world_size and repr(layout) not in self._groups:
            timeout = timedelta(seconds=timeout_s())
            group, _ = dist.new_subgroups_by_enumeration(layout.peers(), timeout=timeout)  # type: ignore[no-untyped-call]
            self._groups[repr(layout)] = group

    @property
    def mesh(self) -> DeviceMesh:
        names, sizes = zip(*self.layout.sizes.items(), strict=True)
        return _mesh(self._device_type, names, sizes)

    def record_answers(self, active: ActivePlugins) -> None:
        answers = answers_of(os.getpid())
        answers.record(active)
        if (board := bulletin()) is not None:
            answers.confirm = board.confirm

    def hooks(self, settings: Settings) -> tuple[object, ...]:
        return (RankHooks(self),)

    def wrap(self, state: State) -> nn.Module:
        """Returns the model in DistributedDataParallel; unwrapped if nothing is trained."""
        model = state.model
        settings = state.settings
        self.is_strategy = True
        params = [param for param in model.parameters() if param.requires_grad]
        # With data_world_size 1, the ranks hold parts of a single model: no gradients are averaged.
        if not params or self.data_world_size == 1 < self.world_size:
            return model
        if settings.microbatch_size == "auto" and settings.sync_batch_norm:
            raise SettingError(
                "sync_batch_norm and microbatch_size='auto' can't be combined: a rank that has run "
                "out of memory would leave the others waiting for its statistics",
                fix="give a number: " + as_set(microbatch_size=16),
            )
        # With microbatch_size="auto" a batch is repeated after it ran out of memory. That needs a
        # backward pass that exchanges nothing, so the gradients are averaged later, by `average`.
        is_auto = settings.microbatch_size == "auto"
        has_shards = any(
            sharded(param) is not None for param in params
        )  # which DDP doesn't support
        self.averages_in_backward = has_shards and not is_auto
        if has_shards or is_auto:
            take_from_first(model, self.data_group)
            return model
        wrapped = DistributedDataParallel(
            model,
            process_group=self.data_group,
            device_ids=None if kind_of(state.device).is_host else [state.device],
            gradient_as_bucket_view=True,
            find_unused_parameters=settings.find_unused_parameters,
        )
        _arrange_buckets(wrapped)
        return wrapped

    def loss_weights(
        self, state: State, microbatches: Sequence[Any], weigh: WeighMicrobatch
    ) -> LossWeights:
        """Returns the microbatches' weights, divided by the mean weight of a rank's batch.

        By the mean, not the sum, since DDP divides the sum of gradients by the number of ranks. If
        ranks can have different weights, their sum starts now and is awaited at the first loss.
        """
        weights: list[Weight] = [0.0] * len(microbatches)
        if state.count.samples:
            weights = weights_of(state, microbatches, weigh)
        if state.even_batches:
            total_of_rank = sum(weights)
            self.exchange.weigh(float(total_of_rank))
            return Parts(weights, lambda: total_of_rank) if len(weights) > 1 else WHOLE
        if state.settings.sync_batch_norm and not self.are_same(len(microbatches)):
            raise TaskError(
                "the ranks have different numbers of microbatches, but sync_batch_norm needs the same "
                "number on all ranks",
                fix="unset microbatch_size, or give all ranks batches of the same size",
            )
        total = on_device(sum(weights), state.device)
        work = dist.all_reduce(total, group=self.aside, async_op=True)

        def mean_total() -> Tensor:
            wait_for(work)
            return (total / self.world_size).float()

        return Parts(weights, mean_total)

    def average(self, state: State, optimizers: Mapping[str, Optimizer]) -> None:
        """Averages gradients over the ranks, unless a plugin's strategy does it."""
        if self.is_strategy and not self.averages_in_backward:
            average_gradients(self, state, optimizers)

    def mean(self, value: Tensor) -> Tensor:
        total = value.detach().clone()
        dist.all_reduce(total, group=self.aside)
        return total / self.world_size

    def all_gather(self, value: Any) -> list[Any]:
        # Mostly all ranks have equal values. Comparing digests first then spares a transfer that grows
        # with the number of ranks.
        if self._comparison(dumps(value))():
            return [copy.deepcopy(value) for _ in range(self.world_size)]
        values = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.host)
        return values

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self.host)
        return values or []

    def from_first(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.host)
        return values[0]

    def count_true(self, answer: bool) -> int:
        answers = array("d", [float(answer)])
        dist.all_reduce(torch.frombuffer(answers, dtype=torch.float64), group=self.host)
        return int(answers[0])

    def are_same(self, value: Any) -> bool:
        text = json.dumps(value, sort_keys=True, default=repr)
        return self._comparison(text.encode())()

    def _comparison(self, data: bytes) -> Callable[[], bool]:
        """Starts to compare data between the ranks; returns a function that waits for the result."""
        # A single reduction: all digests are equal if their minimum is their maximum, which is minus
        # the minimum of the negated digests.
        digest = int.from_bytes(hashlib.blake2b(data, digest_size=7).digest())
        minima = array("q", (digest, -digest))
        tensor = torch.frombuffer(minima, dtype=torch.int64)
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self.host, async_op=True)

        def are_equal() -> bool:
            wait_for(work)
            return minima[0] == -minima[1]

        return are_equal

    def compare_weights(self, state: State, sums: Mapping[str, float], when: str) -> None:
        """Compares weights; where a plugin's strategy manages them, only copies of sharded weights."""
        require_same_weights(self, state, sums, when)

    def reducer(self, device: torch.device) -> OverRanks | None:
        """Returns a function that reduces logged numbers over ranks, in one sum per log interval.

        Beforehand a digest of the names is compared on the host, while the next batch is trained: ranks
        that logged different names would add up different numbers.
        """

        def over_ranks(rows: Sequence[Row], reductions: Mapping[str, Reduction]) -> Reduce:
            cells: list[Cell] = []
            signature: list[_CellSignature] = []
            row_idx = 0
            for row in rows:
                names = [name for name in sorted(row) if name in reductions]
                for name in names:
                    cells.append((row, name))
                    num_summands = len(_summands(row[name]))
                    signature.append((row_idx, name, reductions[name], num_summands))
                # Rows without such a name don't count: a rank may have more of them than another rank.
                row_idx += bool(names)
            have_same = self._comparison(repr(signature).encode())

            def reduce() -> list[Cell]:
                if not have_same():
                    self._raise_different_names(signature)
                return self._reduced(cells, reductions, device)

            return reduce

        return over_ranks

    def _reduced(
        self, cells: list[Cell], reductions: Mapping[str, Reduction], device: torch.device
    ) -> list[Cell]:
        """Replaces this rank's values by the values over all ranks; returns the cells."""
        if not cells:
            return cells
        values = [value for row, name in cells for value in _summands(row[name])]
        sums = torch.stack([on_device(value, device).reshape(()) for value in values])
        dist.all_reduce(sums, group=self.aside)
        summed = iter(sums)
        for row, name in cells:
            if isinstance(shares := row[name], tuple):
                row[name] = mean([Share(next(summed), next(summed)).mean() for _ in shares])
            elif reductions[name] == "sum":
                row[name] = next(summed) / (self.world_size // self.data_world_size)
            else:
                row[name] = next(summed) / self.world_size
        return cells

    def _raise_different_names(self, signature: list[_CellSignature]) -> NoReturn:
        """Raises TaskError on every rank, as they are about to sum different numbers."""
        signatures = self.all_gather(signature)
        common = set.intersection(*map(set, signatures))
        descriptions = []
        for rank, signature_of_rank in enumerate(signatures):
            names = sorted({cell[1] for cell in signature_of_rank if cell not in common})
            logged = ", ".join(map(repr, names)) or "nothing"
            descriptions.append(f"rank {self.layout.label(rank)} logged {logged}")
        raise TaskError(
            "the ranks logged different numbers to average or add up in the same batch: "
            f"{', '.join(descriptions)}",
            fix="log the same names with the same reduce at the same batches on every rank, or leave "
            "reduce out of state.log(name, value, reduce=...)",
        )

    def watched(self) -> AbstractContextManager[None]:
        return watched()

    def crew(self) -> Crew:
        """Returns the crew of all ranks; its group is created on the first call."""
        if "crew" not in self._groups:
            timeout = timedelta(seconds=timeout_s())
            self._groups["crew"] = dist.new_group(backend="gloo", timeout=timeout)
        return CrewOfRanks(self._groups["crew"])


def _arrange_buckets(wrapped: DistributedDataParallel) -> None:
    """Fixes the gradients' order in DDP's buckets before the first step.

    With three or more ranks the order affects the last bits of the sums. DDP rebuilds its buckets
    after the first backward pass of a process (torch 2.13), in the order in which gradients arrived:
    the first step of a resumed run would sum in another order than the same step of an uninterrupted
    run. So this runs a backward pass with zeros beforehand, in reverse order of the parameters.
    """
    model = wrapped.module
    wrapped.module = _Sums(wrapped.module)
    sums = wrapped(None)  # with device_ids it fails without an argument (torch 2.13)
    torch.autograd.backward(sums, [torch.zeros_like(total) for total in sums])
    wrapped.module = model
    model.zero_grad(set_to_none=True)


class _Sums(nn.Module):
    """Computes the sum of each trained parameter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model  # a submodule, as DDP looks up and broadcasts the buffers of its module
        ids_of_sparse = set()
        for module in model.modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
                ids_of_sparse.add(id(module.weight))
        params = [param for param in model.parameters() if param.requires_grad]
        self._params = [(param, id(param) in ids_of_sparse) for param in params]

    def forward(self, _: None) -> tuple[Tensor, ...]:
        sums = []
        index = torch.zeros(1, dtype=torch.int64, device=self._params[0][0].device)
        for param, is_sparse in self._params:
            # DDP expects a sparse gradient for the weight of a sparse embedding.
            summands = embedding(index, param, sparse=True) if is_sparse else param
            sums.append(summands.sum())
        return tuple(sums)


def join() -> DataParallel:
    """Joins the processes that torchrun's variables describe, or uses the existing process group.

    Raises:
        EventloopError: the other processes can't be reached.
    """
    if not dist.is_initialized():
        try:
            timeout = timedelta(seconds=timeout_s())
            stay_on_loopback()
            if is_host_of_store() and "MASTER_PORT" in os.environ:
                host_on_loopback(os.environ.get("MASTER_ADDR", ""), int(os.environ["MASTER_PORT"]))
            store, rank, world_size = next(rendezvous("env://", timeout=timeout))
            # torchrun keeps its store over a restart, with addresses of processes that have ended, to
            # which torch would try to connect (torch 2.13).
            store = PrefixStore(f"eventloop/{attempt()}", store)
            dist.init_process_group(
                collective_backends(),
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=timeout,
            )
        except (OSError, ValueError, RuntimeError) as error:
            names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
            start = "start with `eventloop fit TASK --nproc 2` or with torchrun, which set "
            is_taken = "address already in use" in str(error).lower()
            raise EventloopError(
                f"the other ranks can't be reached: {error}",
                fix="set MASTER_PORT to a free port, the same on all ranks"
                if is_taken
                else start + ", ".join(names),
                set=", ".join(f"{name}={os.environ.get(name, 'nothing')}" for name in names),
            ) from error
    return DataParallel(_groups())


@functools.cache
def _groups() -> dict[object, dist.ProcessGroup]:
    """Creates the additional process groups, once for all trainers of this process."""
    timeout = timedelta(seconds=timeout_s())
    groups: dict[object, dist.ProcessGroup] = {
        "host": dist.new_group(backend="gloo", timeout=timeout),
        "aside": dist.new_group(timeout=timeout),
    }
    atexit.register(_leave, groups)
    return groups


def _summands(value: Number | Shares) -> Sequence[Number]:
    """Returns the summands of a logged number: two for each share of a mean, otherwise the number."""
    if isinstance(value, tuple):
        return [summand for share in value for summand in share]
    return (value,)


@functools.cache
def _mesh(device_type: str, names: tuple[str, ...], sizes: tuple[int, ...]) -> DeviceMesh:
    """Creates a mesh, once for all trainers of this process."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type, sizes, mesh_dim_names=names)


def _leave(groups: dict[object, dist.ProcessGroup]) -> None:
    """Destroys the process groups, so that their threads end before the interpreter does.

    A remaining gloo thread frees tensors during interpreter shutdown and aborts (torch 2.13).
    """
    if hasattr(sys, "last_value"):
        return  # after an exception: destroying a group could wait for ranks that are gone
    groups.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
