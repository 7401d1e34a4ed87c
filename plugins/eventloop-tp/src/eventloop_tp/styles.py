"""Divides modules according to a plan, in place, with torch's parallel styles; free of hooks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from eventloop import TaskError
from eventloop.toolbox import sharded, sum_over_
from eventloop_tp.plans import (
    COLWISE,
    DROPOUT,
    GATHERED,
    REPLICATED,
    ROWWISE,
    SEQUENCE,
    SUMMED,
    Placed,
    owners,
)


def divide(
    model: nn.Module,
    placed: Sequence[Placed],
    mesh: DeviceMesh,
    *,
    sequence: bool = False,
    keeps: str | None = None,
) -> None:
    """Converts all parameters of a model to DTensors, in place, sharded where the plan says.

    Args:
        placed: as `eventloop_tp.resolved` returns it.
        mesh: one-dimensional.
        sequence: whether the modules between the divided layers are divided along dimension 1.
        keeps: the name of the layer whose outputs stay DTensors, sharded along the last dimension.
    """
    uses: dict[int, list[tuple[nn.Module, str, bool]]] = {}
    for _, module, name, param in owners(model):
        uses.setdefault(id(param), []).append((module, name, param.requires_grad))
    for entry in placed:
        style = _style(entry, sequence=sequence, keeps=entry.name == keeps)
        if style is not None:
            parallelize_module(entry.module, mesh, style)
        if sequence and isinstance(entry.module, nn.Embedding):
            entry.module.register_forward_pre_hook(
                partial(_require_even, mesh.size()), prepend=True
            )
    summed = {id(entry.module) for entry in placed if entry.style == SUMMED}
    depth = [0]
    _count(model, depth)
    for _, module, name, param in [*owners(model)]:
        if sharded(param) is None:
            spread = distribute_tensor(param.detach(), mesh, [Replicate()])
            module.register_parameter(name, nn.Parameter(spread))
            if "_tp" not in module.__dict__:
                module.__dict__["_tp"] = (
                    depth,
                    Partial() if id(module) in summed else Replicate(),
                )
                module.__class__ = _with_locals(module.__class__)  # type: ignore[arg-type]
                _count(module, depth)
    for (owner, name, is_trained), *tied in uses.values():
        tied_param = owner.get_parameter(name)
        tied_param.requires_grad = is_trained
        for tied_module, tied_name, _ in tied:
            tied_module.register_parameter(tied_name, tied_param)
    for entry in placed:
        if entry.style == DROPOUT:
            draw_apart(entry.module, mesh.get_local_rank())


def _style(entry: Placed, *, sequence: bool, keeps: bool) -> ParallelStyle | None:
    between: Placement = Shard(1) if sequence else Replicate()
    is_embedding = isinstance(entry.module, nn.Embedding)
    input_layout = Replicate() if is_embedding else between
    if entry.style == COLWISE or keeps:
        output_layout = between if is_embedding else Shard(-1)
        return ColwiseParallel(
            input_layouts=input_layout, output_layouts=output_layout, use_local_output=not keeps
        )
    if entry.style == GATHERED:
        return ColwiseParallel(input_layouts=input_layout, output_layouts=Replicate())
    if entry.style == ROWWISE:
        input_layout = Replicate() if is_embedding else Shard(-1)
        return RowwiseParallel(input_layouts=input_layout, output_layouts=between)
    if entry.style == SEQUENCE:
        return SequenceParallel(use_local_output=True)
    if entry.style == REPLICATED and is_embedding and sequence:
        return _Split()
    return None


class _Split(ParallelStyle):
    """An embedding that every rank has whole, and whose outputs are divided along dimension 1."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def wrap_input(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)

        def divide_output(_: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
            return outputs.redistribute(placements=[Shard(1)]).to_local()

        return distribute_module(module, device_mesh, None, wrap_input, divide_output)


def _require_even(size: int, module: nn.Module, inputs: tuple[Any, ...]) -> None:
    length = inputs[0].shape[1] if inputs[0].ndim > 1 else 0
    if length % size or not length:
        raise TaskError(
            f"sequence: a batch of shape {tuple(inputs[0].shape)} can't be divided along dimension 1 "
            f"over {size} ranks",
            fix=f"let the data loader give lengths that {size} divides, by padding say, or leave "
            "sequence out",
        )


@cache
def _with_locals(kind: type[nn.Module]) -> type[nn.Module]:
    """Returns a class whose replicated parameters are plain tensors while the model computes.

    `_parameters` has the DTensors, which names, state dicts and optimizers see.
    """

    def attribute(self: nn.Module, name: str) -> Any:
        value = kind.__getattr__(self, name)
        sharded_value = sharded(value)
        depth, grads = self.__dict__["_tp"]
        # FSDP, which adds a mesh dimension, gathers the parameter itself.
        if sharded_value is None or not depth[0] or sharded_value.device_mesh.ndim > 1:
            return value
        return sharded_value.to_local(grad_placements=[grads])

    members = {"__getattr__": attribute, "__module__": kind.__module__}
    cls = type(kind.__name__, (kind,), members)
    cls.__qualname__ = kind.__qualname__
    return cls


def _count(module: nn.Module, depth: list[int]) -> None:
    """Counts in how many calls of modules the model is."""

    def enter(*_: Any) -> None:
        depth[0] += 1

    def leave(*_: Any) -> None:
        depth[0] -= 1

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


def draw_apart(module: nn.Module, number: int) -> None:
    """Has a module draw random numbers of this rank's own; others draw alike as before.

    The seed is drawn from the generator that all ranks share, so that a run that is resumed, or a layer
    that computes again, draws the same.

    Args:
        number: of the rank among those that share a layer.
    """
    forks: list[Any] = []

    def before(*_: Any) -> None:
        if not module.training:
            return
        seed = int(torch.randint(2**31, ()))
        devices = (
            [torch.accelerator.current_device_index()] if torch.accelerator.is_available() else []
        )
        fork = torch.random.fork_rng(devices)
        fork.__enter__()
        forks.append(fork)
        torch.manual_seed(seed * 1024 + number)

    def after(*_: Any) -> None:
        if forks:
            forks.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)


def add_up_gradients(params: Sequence[Tensor]) -> None:
    """Completes gradients that are partial sums over the ranks, with one all-reduce for each mesh dimension."""
    partial: list[tuple[Tensor, Any]] = []
    for param in params:
        grad = sharded(param.grad)
        if grad is not None and any(placement.is_partial() for placement in grad.placements):
            partial.append((param, grad))
    values = [grad.to_local() for _, grad in partial]
    groups = [
        tuple(
            grad.device_mesh.get_group(idx)
            for idx, placement in enumerate(grad.placements)
            if placement.is_partial()
        )
        for _, grad in partial
    ]
    sum_over_(values, groups)
    for (param, grad), value in zip(partial, values, strict=True):
        placements = [
            Replicate() if placement.is_partial() else placement for placement in grad.placements
        ]
        full_grad = DTensor.from_local(
            value,
            grad.device_mesh,
            placements,
            run_check=False,
            shape=grad.shape,
            stride=grad.stride(),
        )
        param.grad = full_grad
