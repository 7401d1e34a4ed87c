"""The plugin: when parameters are sharded and gathered, so that every rank takes part each time."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from eventloop import PluginError, SettingError, State, hookimpl
from eventloop.toolbox import (
    Layout,
    Microbatches,
    as_option,
    as_set,
    kept_generators,
    known_length,
    map_tensors,
    switch_off,
    take_from_first,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

    from eventloop_fsdp.deferred_init import DeferredModel

# Importing FSDP2 takes a second or more, and a single process doesn't need it: each function that does
# imports it itself.
# The steps of these optimizers flatten DTensors, or write values of another placement into them
# (torch 2.13).
_CANT_STEP = (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Rprop)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Fsdp:
    """Shards parameters, gradients and optimizer states over the ranks: FSDP2 instead of DDP.

    Each rank holds a share of every parameter; a part of the model is gathered only while it computes.
    Training yields the same weights as DDP. In a single process there is nothing to shard, and the
    plugin is off.

    Args:
        layers: class names of the submodules to gather individually; not set: the classes repeated in an
            nn.Sequential, ModuleList or ModuleDict, such as a transformer's blocks. All other
            parameters are gathered with the model.
        param_dtype: dtype in which parameters are gathered and computed with; bf16 halves the traffic, and
            needs precision bf16. The optimizer's shards stay fp32.
        reduce_dtype: dtype in which gradients are averaged; bf16 halves the traffic.
        reshard_after_forward: whether to free a layer between its forward and backward; without, it is
            gathered once less, and all layers stay in memory.
        replicate: number of copies of the model, each sharded over as many consecutive ranks, such as the
            ranks of a machine; gradients are averaged over the copies.
        offload: whether shards, their gradients and optimizer states stay on the host, where the
            optimizer steps; a layer is on the device while it computes.
        meta: whether no rank ever holds the whole model: parameters are initialized after sharding, one at
            a time, or loaded from `weights` or the run's checkpoint without initialization.
        weights: initial weights of a new run: a safetensors file, the folder of a pretrained model, a
            checkpoint, or the folder of a run; each rank reads only its shards. Ignored by a resumed run.
            Also works in a single process.

    Source: Zhao et al. 2023, arXiv:2304.11277.
    """

    free_options = ("weights",)

    def __init__(
        self,
        *,
        layers: list[str] | None = None,
        param_dtype: Literal["fp32", "bf16"] = "fp32",
        reduce_dtype: Literal["fp32", "bf16"] = "fp32",
        reshard_after_forward: bool = True,
        replicate: int = 1,
        offload: bool = False,
        meta: bool = False,
        weights: str | None = None,
    ) -> None:
        self.layers = layers
        self.param_dtype = param_dtype
        self.reduce_dtype = reduce_dtype
        self.reshard_after_forward = reshard_after_forward
        self.replicate = replicate
        self.offload = offload
        self.meta = meta
        self.weights = weights
        self._note = ""
        self._goes_on = False
        self._deferred: DeferredModel | None = None
        self._root: FSDPModule | None = None
        self._sharded: list[FSDPModule] = []
        self._exchanges = True
        self._has_agreed = False  # whether ranks have agreed on their number of passes
        self._is_last = False
        self._num_more: int | None = None  # passes of an evaluation beyond this rank's batches

    @hookimpl
    def unsuitable(self, state: State) -> str | None:
        """Returns why the plugin can't be used: there is no other rank to shard over; None if it can."""
        if state.world_size == 1 and self.weights is None:
            return "one process alone has nothing to shard; `--nproc 2` starts two"
        return None

    @hookimpl(wrapper=True)
    def build_mesh(self, state: State) -> Generator[None, Layout, Layout]:
        """Divides the ranks into copies of the model, if several are requested."""
        layout = yield
        if self.replicate == 1 or state.world_size == 1:
            return layout
        from eventloop_fsdp.sharding import with_copies

        return with_copies(layout, self.replicate)

    @hookimpl(wrapper=True)
    def build_model(self, state: State) -> Generator[None, nn.Module, nn.Module]:
        """With `meta`, builds the model without memory for its parameters."""
        if not self.meta or (state.world_size == 1 and self.weights is None):
            return (yield)
        from eventloop_fsdp.deferred_init import DeferredModel

        self._deferred = DeferredModel(records=self.weights is None)
        with self._deferred:
            return (yield)

    @hookimpl(conditional=True)
    def wrap_model(self, state: State) -> nn.Module | None:
        """Shards the model, in place; names and calls stay the same."""
        if state.world_size == 1 and self._deferred is None:
            return None
        from eventloop_fsdp.deferred_init import give_memory, give_memory_whole
        from eventloop_fsdp.sharding import parts_of, shard

        if state.world_size == 1:
            give_memory_whole(state.model, state.device)
            return None
        self._require_usable(state)
        buffers_alone = self._deferred is not None
        take_from_first(state.model, state.data_group, buffers_alone=buffers_alone)
        if self._deferred is not None:
            self._deferred.bind(state.model)
        layers_to_shard = parts_of(state.model, self.layers)
        self._sharded = shard(
            state.model,
            layers_to_shard,
            self._mesh(state),
            policy=self._policy(),
            reshard_after_forward=self.reshard_after_forward,
            offload=self.offload,
        )
        self._root = self._sharded[0]
        if self._deferred is not None:
            give_memory(state.model, torch.device("cpu") if self.offload else state.device)
        if state.settings.find_unused_parameters:
            self._root.set_reduce_scatter_unused_params(True)
        return state.model

    @hookimpl(conditional=True)
    def wrap_companion(self, state: State, companion: nn.Module) -> nn.Module | None:
        """Shards an inference-only model in place; each part is resharded after its forward."""
        if state.world_size == 1:
            return None
        from eventloop_fsdp.sharding import parts_of, shard

        self._require_usable(state)
        shard(
            companion,
            parts_of(companion),
            self._mesh(state),
            policy=self._policy(),
            offload=self.offload,
            keeps_root=False,
        )
        return companion

    @hookimpl(wrapper=True)
    def build_optimizers(
        self, state: State
    ) -> Generator[None, dict[str, Optimizer], dict[str, Optimizer]]:
        """Refuses optimizers that can't step shards."""
        optimizers = yield
        for name, optimizer in optimizers.items():
            if self._root is not None and isinstance(optimizer, _CANT_STEP):
                raise SettingError(
                    f"the optimizer {name!r} is {type(optimizer).__name__}, which can't step the "
                    "shards of fsdp",
                    fix="use another optimizer, such as AdamW, or train with DDP: fsdp is off with "
                    + switch_off("fsdp"),
                )
        return optimizers

    @hookimpl
    def before_load(self, state: State) -> None:
        """Skips initialization: the checkpoint provides the weights, unless it is partial."""
        if state.owner("select_weights") != "core":
            self._fill(state)
        self._goes_on = True

    @hookimpl(tryfirst=True)
    def after_load(self, state: State) -> None:
        """Loads the weights of a new run, or initializes parameters that have no memory yet."""
        if not self._goes_on:
            self._fill(state)
        self._deferred = None

    def _fill(self, state: State) -> None:
        deferred = self._deferred
        if self.weights is not None:
            from eventloop_fsdp.pretrained import load_pretrained

            renaming = load_pretrained(state.model, Path(self.weights), warns=state.rank == 0)
            self._note = f"weights of {self.weights}{f', {renaming}' if renaming else ''}"
        elif deferred is not None:
            deferred.fill(state.model)

    @hookimpl
    def header_note(self) -> str:
        """Returns the source of the weights."""
        return self._note

    @hookimpl(wrapper=True)
    def forward(self, state: State) -> Generator[None, Any, Any]:
        """First makes passes with zero gradients, if other ranks have more microbatches."""
        is_first = state.microbatch is not None and state.microbatch_idx == 0
        if self._root is None or not is_first or state.even_batches:
            return (yield)
        numbers = state.all_gather(
            state.num_microbatches
        )  # only communicates if the numbers may differ
        if num_more := max(numbers) - state.num_microbatches:
            self._exchange(False)
            _pass_for_nothing(state, num_more)
        self._has_agreed = True
        return (yield)

    @hookimpl(wrapper=True)
    def backward(self, state: State) -> Generator[None, bool, bool]:
        """Exchanges gradients only in the last backward of a batch, or of a closure."""
        if state.microbatch_idx == 0 and not state.even_batches and not self._has_agreed:
            _require_same_number(state)  # of passes without the action `forward`
        self._has_agreed = False
        self._exchange(state.microbatch_idx == state.num_microbatches - 1)
        return (yield)

    def _exchange(self, exchanges: bool) -> None:
        """Sets whether a backward exchanges gradients."""
        if self._root is not None and exchanges != self._exchanges:
            self._root.set_requires_gradient_sync(exchanges)
            self._exchanges = exchanges

    @hookimpl(wrapper=True)
    def eval_batches(self, state: State) -> Generator[None, Iterable[Any], Iterable[Any]]:
        """Reads a batch ahead, to know the last batch; gathers the number of batches of each rank."""
        batches = yield
        lengths = state.all_gather(known_length(batches))
        self._num_more = None if None in lengths else max(lengths) - lengths[state.rank]
        return self._watched(batches, lengths[state.rank])

    @hookimpl(wrapper=True)
    def eval_forward(self, state: State) -> Generator[None, Any, Any]:
        """Makes as many passes as the rank with the most batches."""
        return (yield from self._together(state))

    @hookimpl(wrapper=True)
    def predict_forward(self, state: State) -> Generator[None, Any, Any]:
        """Makes as many passes as the rank with the most batches."""
        return (yield from self._together(state))

    def _mesh(self, state: State) -> DeviceMesh:
        assert state.mesh is not None
        return state.mesh[state.layout.data]

    def _require_usable(self, state: State) -> None:
        from torch.distributed.fsdp import FSDPModule

        settings = state.settings
        # Zeros for parameters that a rank hasn't used; of torch 2.13.
        can_fill_in = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
        if settings.microbatch_size == "auto":
            raise SettingError(
                "microbatch_size='auto' isn't possible with fsdp: a rank that runs out of memory "
                "would leave the others waiting for its shards",
                fix="give a number, "
                + as_set(microbatch_size=16)
                + ", or train with DDP: fsdp is off with "
                + switch_off("fsdp"),
            )
        if settings.find_unused_parameters and not can_fill_in:
            raise SettingError(
                f"find_unused_parameters isn't possible with fsdp and torch {torch.__version__}",
                fix="install torch 2.13 or later, or train with DDP: fsdp is off with "
                + switch_off("fsdp"),
            )
        if self.param_dtype == "bf16" and state.precision.name != "bf16":
            raise SettingError(
                f"fsdp.param_dtype is bf16, but the run's precision is {state.precision.name}",
                fix="set both, "
                + as_set(precision="bf16")
                + " and "
                + as_option("fsdp", param_dtype="bf16")
                + ", or "
                "leave it out",
            )

    def _policy(self) -> MixedPrecisionPolicy:
        """Returns the dtypes for communication; autocast decides the dtypes of computations."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        # None is the parameters' own type.
        is_mixed = self.param_dtype != "fp32" or self.reduce_dtype != "fp32"
        return MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if self.param_dtype == "bf16" else None,
            reduce_dtype=_DTYPES[self.reduce_dtype] if is_mixed else None,
            cast_forward_inputs=False,
        )

    def _watched(self, batches: Iterable[Any], length: int | None) -> Iterator[Any]:
        nothing = object()
        pairs = itertools.pairwise(itertools.chain(batches, [nothing]))
        for num, (batch, following) in enumerate(pairs, 1):
            is_last = following is nothing
            if length is not None and is_last != (num == length):
                gave = f"only {num}" if is_last else f"{num} and more"
                raise PluginError(
                    f"an eval data loader of {length} batches gave {gave}, but every pass over a "
                    "sharded model takes all ranks",
                    fix="let len() of its sampler say how many it yields",
                )
            microbatches = [batch]
            if isinstance(batch, Microbatches):
                self._num_more = None  # the number of microbatches of later batches is unknown
                microbatches = [*batch]
            for idx, microbatch in enumerate(microbatches, 1):
                self._is_last = is_last and idx == len(microbatches)
                yield microbatch

    def _together(self, state: State) -> Generator[None, Any, Any]:
        """Runs a pass together with all ranks, and repeats it while other ranks still have batches.

        If a length is unknown, the ranks exchange before each pass whether they have a batch.
        """
        if self._num_more is None:
            state.count_true(True)
        outputs = yield
        if self._is_last:
            for _ in range(self._num_more or 0):
                state.again()
            while self._num_more is None and state.count_true(False):
                state.again()
            # Without gradients, no backward frees the parameters that the root keeps for it.
            for module in self._sharded:
                module.reshard()
        return outputs


def _require_same_number(state: State) -> None:
    """Checks once per step that all ranks have the same number of microbatches, or they would hang."""
    numbers = state.all_gather(state.num_microbatches)
    differing_rank = next(
        (rank for rank, number in enumerate(numbers) if number != numbers[0]), None
    )
    if differing_rank is not None:
        raise PluginError(
            f"rank 0 has {numbers[0]} microbatches and rank {differing_rank} has {numbers[differing_rank]}, but every "
            "pass over a sharded model takes all ranks",
            fix="give all ranks batches of one size, or unset microbatch_size",
        )


def _pass_for_nothing(state: State, num: int) -> None:
    """Runs forward and backward passes with zero gradients; call it in a wrapper of `forward`.

    Buffers and random generators are restored.
    """
    buffers = [(buffer, buffer.clone()) for buffer in state.model.buffers()]
    with kept_generators():
        for _ in range(num):
            outputs = state.again()
            is_nest = isinstance(outputs, (Tensor, tuple, list, Mapping))
            tensors: list[Tensor] = []
            map_tensors(tensors.append, outputs if is_nest else vars(outputs))
            sums = [tensor.sum() for tensor in tensors if tensor.requires_grad]
            torch.autograd.backward(torch.stack(sums).sum() * 0)
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
