"""Operators that torch would split into several kernels on an out-of-tree device.

Recurrent networks and attention are computed and differentiated by the host's own operators: a single
cuDNN call or flash attention on a GPU is a single operation here, too, with the CPU's bits.
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
NETWORKS = ("lstm", "gru", "rnn_tanh", "rnn_relu")  # over layers and steps; each also has a cell
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
    """Applies an operator of the host to the wrapped tensors, and differentiates it."""

    @staticmethod
    def forward(ctx: Any, operator: Any, args: Any, kwargs: Any, *tensors: Tensor) -> Any:
        line = lines.current()
        line.advance()
        raws = [
            _read(tensor, line).detach().requires_grad_(tensor.requires_grad) for tensor in tensors
        ]
        remaining_raws = iter(raws)
        with torch.enable_grad(), generators.in_place_of_the_hosts():
            results = operator(
                *_replaced(args, remaining_raws), **_replaced(kwargs, remaining_raws)
            )
        ctx.inputs = raws
        ctx.outputs = (results,) if isinstance(results, Tensor) else results
        return tuple(PretendTensor(output.detach()) for output in ctx.outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        line = lines.current()
        line.advance()
        pairs = [
            (output, _read(grad, line))
            for output, grad in zip(ctx.outputs, grads, strict=True)
            if output.requires_grad
        ]
        inputs = [tensor for tensor in ctx.inputs if tensor.requires_grad]
        outputs, raw_grads = zip(*pairs, strict=True)
        # Kept, so that a backward pass with retain_graph=True can run again.
        input_grads = iter(torch.autograd.grad(outputs, inputs, raw_grads, retain_graph=True))
        no_grads = (None, None, None)  # of operator, args and kwargs
        return (
            *no_grads,
            *(
                PretendTensor(next(input_grads)) if tensor.requires_grad else None
                for tensor in ctx.inputs
            ),
        )


def _packed(padded: PretendTensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Packs sequences; their lengths, and the sizes of the packed steps, stay on the host."""
    line = lines.current()
    line.advance()
    data, sizes = aten._pack_padded_sequence(_read(padded, line), lengths, batch_first)
    return PretendTensor(data), sizes


def _read(tensor: Tensor, line: lines.Line) -> Tensor:
    if not isinstance(tensor, PretendTensor):  # the sizes of a packed batch stay on the host
        return tensor
    tensor.block.read(line)
    return tensor.raw


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for nested in value:
            yield from _tensors(nested)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _replaced(value: Any, remaining_raws: Iterator[Tensor]) -> Any:
    """Returns a nest of arguments with each tensor replaced by the next raw tensor."""
    if isinstance(value, Tensor):
        return next(remaining_raws)
    if isinstance(value, (list, tuple)):
        return [_replaced(nested, remaining_raws) for nested in value]
    if isinstance(value, dict):
        return {name: _replaced(nested, remaining_raws) for name, nested in value.items()}
    return value
