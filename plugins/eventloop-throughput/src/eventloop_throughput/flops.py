"""The operations of a model, counted from inside its forward pass.

Counted are the products of matrices, convolutions and attention that torch's flop counter knows,
a multiplication and an addition as two. By the usual convention a backward pass counts as twice its
forward pass, and recomputation that saves memory doesn't count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Private, but torch's documented way to see every operation, and without a public name
# (torch 2.13).
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

Shapes = tuple[tuple[int, ...], ...]
_FORWARD_AND_BACKWARD = 3
_MOST_SHAPES = 32
_ATEN = torch.ops.aten
_FORMULAS: Mapping[Any, Callable[..., int]] = {
    # The same attention, which the registry has for GPUs only (torch 2.13).
    _ATEN._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        _ATEN._scaled_dot_product_flash_attention
    ],
    **flop_registry,
}


class ForwardFlops:
    """Knows the operations of forward passes by the shapes of their inputs.

    The first pass with inputs of new shapes is counted, which costs some microseconds an operation;
    later passes are looked up. If shapes never repeat, as with text of any length, passes from some
    number on are estimated in proportion to the number of entries.
    """

    def __init__(self) -> None:
        self._known: dict[Shapes, int] = {}
        self._count: _Count | None = None
        self._shapes: Shapes = ()

    def before(self, model: nn.Module, inputs: Any) -> None:
        """Begins to count, if a pass with such inputs wasn't counted before."""
        self.give_up()
        self._shapes = shapes_of(inputs)
        if self._shapes not in self._known and len(self._known) < _MOST_SHAPES:
            self._count = _Count(model)

    def after(self) -> float:
        """Returns the operations of the pass that has been made, and of its backward pass."""
        if self._count is not None:
            self._known[self._shapes], self._count = self._count.end(), None
        return _FORWARD_AND_BACKWARD * self._forward()

    def give_up(self) -> None:
        """Lets the model go, if a pass was begun and has failed."""
        if self._count is not None:
            self._count.end()
            self._count = None

    def _forward(self) -> float:
        if self._shapes in self._known:
            return self._known[self._shapes]
        num_entries = sum(map(_num_entries, self._known))
        return sum(self._known.values()) * _num_entries(self._shapes) / max(1, num_entries)


class _Count:
    """Counts while a model, or a part of it, computes its outputs: between hooks of its modules.

    Only there calls nest. A mode entered at one event and left at another would conflict with modes
    that other code enters between the two.
    """

    def __init__(self, model: nn.Module) -> None:
        self._mode = _Counter()
        self._depth = 0
        self._handles = [
            handle
            for module in model.modules()
            if not isinstance(module, torch.jit.ScriptModule)  # which takes none
            for handle in (
                module.register_forward_pre_hook(self._enter),
                module.register_forward_hook(self._leave, always_call=True),
            )
        ]

    def end(self) -> int:
        """Returns the number of operations, and leaves the model as it was."""
        for handle in self._handles:
            handle.remove()
        return self._mode.flops

    def _enter(self, module: nn.Module, inputs: object) -> None:
        if not self._depth:
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        self._depth += 1

    def _leave(self, module: nn.Module, inputs: object, outputs: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the operations that it sees; torch's own `FlopCounterMode` tracks modules as well."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = _FORMULAS.get(getattr(func, "overloadpacket", None))
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
        return out


def is_compiled(model: nn.Module) -> bool:
    """Returns whether a part of a model is compiled, so that its operations can't be seen.

    Detected by attributes of `torch.compile` and `Module.compile` without public names (torch 2.13).
    """
    return any(
        isinstance(module, torch._dynamo.OptimizedModule)
        # A scripted module has no such attribute.
        or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def shapes_of(inputs: Any) -> Shapes:
    """Returns the shapes of the tensors in a tensor, a mapping or a sequence."""
    if isinstance(inputs, Tensor):
        return (tuple(inputs.shape),)
    if isinstance(inputs, Mapping):
        inputs = tuple(inputs.values())
    if isinstance(inputs, Sequence):
        return tuple(tuple(value.shape) for value in inputs if isinstance(value, Tensor))
    return ()


def _num_entries(shapes: Shapes) -> int:
    total = 0
    for shape in shapes:
        num_entries = 1
        for length in shape:
            num_entries *= length
        total += num_entries
    return total
