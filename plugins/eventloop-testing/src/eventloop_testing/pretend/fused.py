"""What torch makes of several kernels on a device outside of it, where a GPU, as the CPU, has one.

Recurrent networks and attention are computed, and differentiated, by the host's own operator: what is one call of
cuDNN's, or one flash attention, is one operation here, too, and has the CPU's bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from eventloop_testing.pretend import generators, lines, private
from eventloop_testing.pretend.tensor import SPECIAL, PretendTensor, run

aten = torch.ops.aten
NETWORKS = ("lstm", "gru", "rnn_tanh", "rnn_relu")  # of layers and steps; each has a cell, too
DERIVATIVES = ("mish_backward", "silu_backward")


def implement() -> None:
    """Registers attention, networks of padded and of packed sequences, their cells, and derivatives."""
    for name in DERIVATIVES:
        private.implement(name, functools.partial(run, getattr(aten, name).default))
    attention = aten.scaled_dot_product_attention.default
    private.implement("scaled_dot_product_attention", _by_host(attention), private.AUTOGRAD_KEY)
    for name in NETWORKS:
        packet = getattr(aten, name)
        for overload in ("input", "data"):
            private.implement(
                f"{name}.{overload}", _by_host(getattr(packet, overload)), private.AUTOGRAD_KEY
            )
        cell = getattr(aten, f"{name}_cell").default
        private.implement(f"{name}_cell", _by_host(cell), private.AUTOGRAD_KEY)
    SPECIAL[aten._pack_padded_sequence.default] = _packed


def _by_host(operator: Any) -> Callable[..., Any]:
    def compute(*args: Any, **kwargs: Any) -> Any:
        tensors = list(_tensors((args, kwargs)))
        results = _ByHost.apply(operator, args, kwargs, *tensors)  # type: ignore[no-untyped-call]
        return results if len(results) > 1 else results[0]

    return compute


class _ByHost(torch.autograd.Function):
    """An operator of the host's on what tensors of the device wrap, and its derivative."""

    @staticmethod
    def forward(ctx: Any, operator: Any, args: Any, kwargs: Any, *tensors: Tensor) -> Any:
        line = lines.current()
        line.advance()
        raws = [_read(one, line).detach().requires_grad_(one.requires_grad) for one in tensors]
        left = iter(raws)
        with torch.enable_grad(), generators.in_place_of_the_hosts():
            results = operator(*_replaced(args, left), **_replaced(kwargs, left))
        ctx.inputs = raws
        ctx.outputs = (results,) if isinstance(results, Tensor) else results
        return tuple(PretendTensor(one.detach()) for one in ctx.outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        line = lines.current()
        line.advance()
        pairs = [
            (one, _read(grad, line))
            for one, grad in zip(ctx.outputs, grads, strict=True)
            if one.requires_grad
        ]
        wanted = [one for one in ctx.inputs if one.requires_grad]
        outputs, raw_grads = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outputs, wanted, raw_grads, retain_graph=True))
        return (
            None,
            None,
            None,
            *(PretendTensor(next(found)) if one.requires_grad else None for one in ctx.inputs),
        )


def _packed(padded: PretendTensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Packs sequences; their lengths, and the sizes of the packed steps, stay on the host."""
    line = lines.current()
    line.advance()
    data, sizes = aten._pack_padded_sequence(_read(padded, line), lengths, batch_first)
    return PretendTensor(data), sizes


def _read(tensor: Tensor, line: lines.Line) -> Tensor:
    if not isinstance(tensor, PretendTensor):  # sizes of a packed batch
        return tensor
    tensor.block.read(line)
    return tensor.raw


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _replaced(value: Any, left: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(left)
    if isinstance(value, (list, tuple)):
        return [_replaced(one, left) for one in value]
    return (
        {name: _replaced(one, left) for name, one in value.items()}
        if isinstance(value, dict)
        else value
    )
