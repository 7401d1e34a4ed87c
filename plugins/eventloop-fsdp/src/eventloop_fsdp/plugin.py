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

# FSDP2 takes a second or more to import, which one process doesn't need: each function that does
# imports what it uses.
# Their steps flatten DTensors, or write into them what has another placement (torch 2.13).
_CANT_STEP = (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Rprop)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Fsdp:
    """Shards parameters, gradients and optimizer states over the ranks: FSDP2 instead of DDP.

    Each rank holds a share of every parameter; a part of the model is whole only while it
    computes. Training gives the weights that DDP would give. In one process there is nothing to
    shard, and it takes no part.

    Args:
        layers: the class names of the submodules that are gathered each by itself; not set: those
            that repeat in an nn.Sequential, ModuleList or ModuleDict, a transformer's blocks, say.
            What is in none of them is gathered with the model.
        param_dtype: what parameters are gathered and computed with; bf16 halves what is sent, and
            needs precision bf16. The shards that the optimizer sees stay fp32.
        reduce_dtype: what gradients are averaged in; bf16 halves what is sent.
        reshard_after_forward: whether a layer is given up between its forward and its backward;
            without, it is sent once less, and the memory holds all layers.
        replicate: how many copies of the model there are, each sharded over as many ranks that
            follow each other, those of a machine say; gradients are averaged over the copies.
        offload: whether shards, their gradients and optimizer states stay on the host, where the
            optimizer steps; a layer is on the device while it computes.
        meta: whether no rank holds the model whole: its parameters are drawn once it is sharded, one
            at a time, or loaded from `weights` or from the checkpoint that a run goes on from, and
            not drawn at all.
        weights: what a run that begins is filled with: a safetensors file, the folder of a pretrained
            model, a checkpoint, or the folder of a run; each rank reads what it holds. A run that
            goes on doesn't look at it. In one process, too.

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
        self._has_agreed = False  # whether ranks make as many passes, whatever they have
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
        """Divides the ranks into copies of the model, where several are asked for."""
        layout = yield
        if self.replicate == 1 or state.world_size == 1:
            return layout
        from eventloop_fsdp.sharding import with_copies

        return with_copies(layout, self.replicate)

    @hookimpl(wrapper=True)
    def build_model(self, state: State) -> Generator[None, nn.Module, nn.Module]:
        """Has parameters take no memory before they are sharded, where that is asked for."""
        if not self.meta or (state.world_size == 1 and self.weights is None):
            return (yield)
        from eventloop_fsdp.deferred_init import DeferredModel

        self._deferred = DeferredModel(records=self.weights is None)
        with self._deferred:
            return (yield)

    @hookimpl(conditional=True)
    def wrap_model(self, state: State) -> nn.Module | None:
        """Shards the model, in place; names and calls stay."""
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
        parts = parts_of(state.model, self.layers)
        self._sharded = shard(
            state.model,
            parts,
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
                    fix="take another, AdamW say, or train with DDP: fsdp is off with "
                    + switch_off("fsdp"),
                )
        return optimizers

    @hookimpl
    def before_load(self, state: State) -> None:
        """Leaves the weights to the checkpoint, unless there may be some that it leaves out."""
        if state.owner("select_weights") != "core":
            self._fill(state)
        self._goes_on = True

    @hookimpl(tryfirst=True)
    def after_load(self, state: State) -> None:
        """Loads the weights of a run that begins, or draws them where none takes memory yet."""
        if not self._goes_on:
            self._fill(state)
        self._deferred = None

    def _fill(self, state: State) -> None:
        deferred = self._deferred
        if self.weights is not None:
            from eventloop_fsdp.pretrained import load_pretrained

            done = load_pretrained(state.model, Path(self.weights), warns=state.rank == 0)
            self._note = f"weights of {self.weights}{f', {done}' if done else ''}"
        elif deferred is not None:
            deferred.fill(state.model)

    @hookimpl
    def header_note(self) -> str:
        """Returns where the weights are from."""
        return self._note

    @hookimpl(wrapper=True)
    def forward(self, state: State) -> Generator[None, Any, Any]:
        """Makes passes that count for nothing first, where other ranks have more microbatches."""
        is_first = state.microbatch is not None and state.microbatch_idx == 0
        if self._root is None or not is_first or state.even_batches:
            return (yield)
        numbers = state.all_gather(state.num_microbatches)  # a sum; sent where they differ
        if num_more := max(numbers) - state.num_microbatches:
            self._exchange(False)
            _pass_for_nothing(state, num_more)
        self._has_agreed = True
        return (yield)

    @hookimpl(wrapper=True)
    def backward(self, state: State) -> Generator[None, bool, bool]:
        """Has the last backward of a batch alone exchange gradients; that of a closure, too."""
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
        """Looks one batch ahead, to know the last one; asks how many batches each rank has."""
        batches = yield
        lengths = state.all_gather(known_length(batches))
        self._num_more = None if None in lengths else max(lengths) - lengths[state.rank]
        return self._watched(batches, lengths[state.rank])

    @hookimpl(wrapper=True)
    def eval_forward(self, state: State) -> Generator[None, Any, Any]:
        """Computes as often as the rank with the most batches."""
        return (yield from self._together(state))

    @hookimpl(wrapper=True)
    def predict_forward(self, state: State) -> Generator[None, Any, Any]:
        """Computes as often as the rank with the most batches."""
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
        """Returns the types of what is sent; what computes in which type is left to autocast."""
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
            parts = [batch]
            if isinstance(batch, Microbatches):
                self._num_more = None  # of how many parts batches are isn't known
                parts = [*batch]
            for idx, part in enumerate(parts, 1):
                self._is_last = is_last and idx == len(parts)
                yield part

    def _together(self, state: State) -> Generator[None, Any, Any]:
        """Runs a pass when every rank runs one, and passes for nothing while others have batches.

        Where a length isn't known, each rank says before each pass whether it has a batch.
        """
        if self._num_more is None:
            state.count_true(True)
        outputs = yield
        if self._is_last:
            for _ in range(self._num_more or 0):
                state.again()
            while self._num_more is None and state.count_true(False):
                state.again()
            # Without gradients, nothing else gives up what the root keeps for a backward.
            for one in self._sharded:
                one.reshard()
        return outputs


def _require_same_number(state: State) -> None:
    """Makes sure, once a step, that no rank would wait for a microbatch that others don't have."""
    numbers = state.all_gather(state.num_microbatches)
    other = next((rank for rank, one in enumerate(numbers) if one != numbers[0]), None)
    if other is not None:
        raise PluginError(
            f"rank 0 has {numbers[0]} microbatches and rank {other} has {numbers[other]}, but every "
            "pass over a sharded model takes all ranks",
            fix="give all ranks batches of one size, or unset microbatch_size",
        )


def _pass_for_nothing(state: State, num: int) -> None:
    """Runs forward and backward passes whose gradients are 0; call it in a wrapper of `forward`.

    Buffers and random generators are left as they were.
    """
    buffers = [(one, one.clone()) for one in state.model.buffers()]
    with kept_generators():
        for _ in range(num):
            outputs = state.again()
            is_nest = isinstance(outputs, (Tensor, tuple, list, Mapping))
            found: list[Tensor] = []
            map_tensors(found.append, outputs if is_nest else vars(outputs))
            sums = [one.sum() for one in found if one.requires_grad]
            torch.autograd.backward(torch.stack(sums).sum() * 0)
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
