"""Layers that keep little of a forward pass, and run again when the backward pass comes to them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

# Products of matrices: most of the time of a forward pass, and a small part of what it keeps.
_MATMULS = (
    "addmm",
    "bmm",
    "baddbmm",
    "mm",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
_LISTS = (nn.ModuleList, nn.Sequential)
_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def checkpointed(module: nn.Module, *, keep: str = "nothing") -> None:
    """Lets a module recompute what its backward pass needs; changes its class, and nothing else.

    Where no gradient is needed it does what it did. Dropout draws the same twice, under autocast both
    passes have the same precision, and buffers, such as the statistics of batch norms, are moved
    once.

    Args:
        keep: "nothing" but the inputs; or "matmuls", the results of matrix products and attention,
            which then aren't computed twice.

    Source: Chen et al. 2016, arXiv:1604.06174.
    """
    module.__class__ = _class_of(cast("Hashable", type(module)), keep)


def repeated_layers(model: nn.Module) -> list[str]:
    """Returns the names of the layers that a model repeats most: the blocks of a transformer.

    They are the items of that `ModuleList` or `Sequential` that has the most parameters among those
    whose items are of one class, two at least, each with modules of its own.
    """
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        items = list(module.children()) if isinstance(module, _LISTS) else []
        is_repeated = len(items) > 1 and len({type(one) for one in items}) == 1
        if is_repeated and all(any(one.children()) for one in items):
            found[name] = sum(param.numel() for param in module.parameters())
    if not found:
        return []
    best = max(found, key=lambda name: found[name])
    return [f"{best}.{name}".lstrip(".") for name, _ in model.get_submodule(best).named_children()]


def matching_layers(model: nn.Module, pattern: str) -> list[str]:
    """Returns the names of a model's modules that a pattern matches, the outermost of each nest."""
    names: list[str] = []
    for name, _ in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in names)
        if name and not inside and fnmatchcase(name, pattern):
            names.append(name)
    return names


@functools.cache
def _class_of(kind: Any, keep: str) -> type[nn.Module]:
    """Returns a subclass that checkpoints its forward pass; one for each class, so that it is compared."""
    inner: Callable[..., Any] = kind.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(self, *args, **kwargs)
        call = functools.partial(inner, self)
        if keep == "nothing" and not has_running_statistics(self):
            return checkpoint(call, *args, use_reentrant=False, **kwargs)  # which compiles, too
        contexts = functools.partial(_contexts, self, keep)
        return checkpoint(call, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    names = {"forward": functools.wraps(inner)(forward), "__module__": kind.__module__}
    return type(kind.__name__, (kind,), names)


def has_running_statistics(module: nn.Module) -> bool:
    """Returns whether a forward pass moves something that stays, as in batch norms."""
    return any(name.endswith("running_mean") for name, _ in module.named_buffers())


def _contexts(module: nn.Module, keep: str) -> _Contexts:
    """Returns what encloses the forward pass, and what its repetition."""
    is_moved = has_running_statistics(module)
    if keep == "nothing":
        return nullcontext(), _buffers_restored(module) if is_moved else nullcontext()
    packets = [getattr(torch.ops.aten, name, None) for name in _MATMULS]
    saved = [packet.default for packet in packets if packet is not None]
    first, again = create_selective_checkpoint_contexts(saved)  # type: ignore[no-untyped-call]
    return first, _buffers_restored(module, again) if is_moved else again


@contextmanager
def _buffers_restored(
    module: nn.Module, inner: AbstractContextManager[Any] | None = None
) -> Iterator[None]:
    """Puts buffers back as they were before the repetition, which moves them a second time."""
    saved = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with inner or nullcontext():
            yield
    finally:
        with torch.no_grad():
            for buffer, value in saved:
                buffer.copy_(value)
