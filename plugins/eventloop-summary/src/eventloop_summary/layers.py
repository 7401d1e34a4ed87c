"""What a forward pass shows of each layer, and a table of it; works without a training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Private, but torch's documented way to see every operation, and without a public name
# (torch 2.13).
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


@dataclass
class Layer:
    """A module of a model.

    Args:
        name: its path in the model, "" for the model itself.
        num_params: of it and all that is in it; shared ones count once.
        outputs: the shapes of its first outputs; None where it wasn't called.
        flops: floating-point operations of its forward passes, with all that is in it.
    """

    name: str
    kind: str
    num_params: int
    outputs: tuple[tuple[int, ...], ...] | None = None
    flops: int = 0


class Passes:
    """Watches the forward passes of a model, until it is closed; changes no number of them.

    The mode that counts is entered and left in the hooks of one module, where calls nest.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = [
            Layer(name, type(module).__name__, sum(one.numel() for one in module.parameters()))
            for name, module in model.named_modules()
        ]
        self._mode = _Counter()
        self._depth = 0
        self._before: list[int] = []
        self._handles = [
            handle
            for layer, (_, module) in zip(self.layers, model.named_modules(), strict=True)
            if not isinstance(module, torch.jit.ScriptModule)  # which takes none
            for handle in self._watched(layer, module)
        ]

    def close(self) -> None:
        """Leaves the model as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _watched(self, layer: Layer, module: nn.Module) -> Iterator[Any]:
        def enter(_module: nn.Module, _inputs: object) -> None:
            if not self._depth:
                self._mode.__enter__()  # type: ignore[no-untyped-call]
            self._depth += 1
            self._before.append(self._mode.flops)

        def leave(_module: nn.Module, _inputs: object, outputs: object) -> None:
            layer.flops += self._mode.flops - self._before.pop()
            if layer.outputs is None:
                layer.outputs = tuple(_shapes(outputs))
            self._depth -= 1
            if not self._depth:
                self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

        yield module.register_forward_pre_hook(enter)
        yield module.register_forward_hook(leave, always_call=True)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the operations that it sees, by torch's formulas."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(getattr(func, "overloadpacket", None))
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out


def table(layers: Sequence[Layer], depth: int) -> str:
    """Returns a table: a line for each layer down to a depth, and the model as a whole last."""
    whole, *inner = layers
    shown = [one for one in inner if one.name.count(".") < depth]
    rows = [("layer", "kind", "outputs", "parameters", "FLOPs")]
    rows += [_row("  " * one.name.count(".") + one.name.rpartition(".")[2], one) for one in shown]
    rows.append(_row("all", whole))
    if not whole.outputs and inner:  # a GAN's model is never called as a whole
        flops = sum(one.flops for one in inner if "." not in one.name)
        rows[-1] = (*rows[-1][:4], _count(flops))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join(
        "  ".join(
            text.ljust(width) if idx < 3 else text.rjust(width)
            for idx, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        + "\n"
        for row in rows
    )


def _row(name: str, layer: Layer) -> tuple[str, str, str, str, str]:
    outputs = ", ".join(str(shape) for shape in layer.outputs or ())
    return name, layer.kind, outputs, f"{layer.num_params:,}", _count(layer.flops)


def _count(flops: int) -> str:
    if not flops:
        return ""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if flops >= size:
            return f"{flops / size:.3g} {unit}"
    return str(flops)


def _shapes(outputs: object) -> Iterator[tuple[int, ...]]:
    if isinstance(outputs, Tensor):
        yield tuple(outputs.shape)
    elif isinstance(outputs, Mapping):
        for one in outputs.values():
            yield from _shapes(one)
    elif isinstance(outputs, list | tuple):
        for one in outputs:
            yield from _shapes(one)
