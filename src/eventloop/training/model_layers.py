"""The layers of a model: which there are, and compiling those that are alike once."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

# They hold modules that follow each other; a ModuleList has no forward of its own.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_HAS_LIMIT = "recompile_limit" in inspect.signature(torch.compile).parameters  # torch 2.13
# Of one layer, as torch has it: training and evaluation, and shapes of batches.
_NUM_VARIANTS = 8


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """Returns the layers that repeat, a transformer's blocks say, in order.

    They are the outermost members of an nn.Sequential, ModuleList or ModuleDict that have parameters
    and a sibling of their class.
    """
    return list(dict.fromkeys(_repeated(model)))


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    members = list(module.children())
    classes = Counter(map(type, members))
    for one in members:
        is_container = isinstance(one, _CONTAINERS)
        repeats = isinstance(module, _CONTAINERS) and classes[type(one)] > 1
        if repeats and not is_container and any(True for _ in one.parameters()):
            yield one
        else:
            yield from _repeated(one)


def sharded_layers(model: nn.Module) -> list[nn.Module]:
    """Returns the submodules that FSDP2 shards each by itself; of a model in one part, that."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without it nothing is sharded
    if fsdp is None:
        return []
    found = [one for one in model.modules() if isinstance(one, fsdp.FSDPModule)]
    return [one for one in found if one is not model] or found


def compile_layers(
    layers: Sequence[nn.Module], compiler: Callable[..., Callable[..., Any]]
) -> None:
    """Has layers run compiled, in place; those that print alike share what is compiled.

    Names in their state dicts stay, and their hooks are called.

    Args:
        compiler: `torch.compile`, to which options are given beside a function.
    """
    alike: dict[tuple[type, str], list[nn.Module]] = {}
    for one in layers:
        alike.setdefault((type(one), repr(one)), []).append(one)
    for same in alike.values():
        # A number in each of them that its forward uses, its own place say, is compiled for each.
        limit = {"recompile_limit": _NUM_VARIANTS * len(same)} if _HAS_LIMIT else {}
        compiled = compiler(_run, **limit)
        for one in same:
            # What `Module.compile` sets, which would compile each layer anew; a copy of the module
            # is without it (torch 2.13).
            one._compiled_call_impl = functools.partial(compiled, one)


def _run(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # What `__call__` calls, hooks included (torch 2.13).
    return layer._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
