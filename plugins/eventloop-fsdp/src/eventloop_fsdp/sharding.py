"""Selects the submodules to shard individually, and shards them; free of hooks.

A part is gathered when its forward or backward begins, and freed afterwards. Parameters that are in no part
belong to the root and stay gathered while the whole model computes.

Source: Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel",
arXiv:2304.11277, section 4; `torch.distributed.fsdp.fully_shard` is its successor, FSDP2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import accelerator, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from eventloop import SettingError
from eventloop.toolbox import Layout, closest, repeated_layers


def parts_of(model: nn.Module, class_names: Sequence[str] | None = None) -> list[nn.Module]:
    """Returns the submodules to shard individually, parents before children.

    Args:
        class_names: class names of these submodules; None for repeated layers: the outermost
            members of a container with a sibling of the same class. A member that shares
            parameters with the rest of the model is sharded with the root.

    Raises:
        SettingError: no module has a given class, or its parameters are shared with other modules.
    """
    if class_names is None:
        return [layer for layer in repeated_layers(model) if _owns_its_parameters(layer, model)]
    modules = [module for module in model.modules() if module is not model]
    selected = [module for module in modules if type(module).__name__ in class_names]
    unknown = set(class_names) - {type(module).__name__ for module in selected}
    for name in sorted(unknown):
        raise SettingError(
            f"layers: the model has no submodule of class {name!r}"
            f"{closest(name, {type(module).__name__ for module in modules})}",
            fix="name a class of the model's parts, or leave layers out",
        )
    for module in selected:
        if not _owns_its_parameters(module, model):
            raise SettingError(
                f"layers: a {type(module).__name__} shares parameters with the rest of the model, so "
                "that it can't be sharded by itself",
                fix="leave this class out; the root holds what isn't in a part",
            )
    return selected


def with_copies(layout: Layout, replicate: int) -> Layout:
    """Returns a layout with copies of the model, each on consecutive ranks, that split the samples.

    Raises:
        SettingError: the copies can't have the same size.
    """
    num = layout.data_world_size
    if replicate < 1 or num % replicate:
        raise SettingError(
            f"replicate={replicate}: {num} ranks can't hold as many copies of one size",
            fix=f"give a number that divides {num}, or leave replicate out",
        )
    other_sizes = {name: size for name, size in layout.sizes.items() if name not in layout.data}
    sizes = {"replicate": replicate, "shard": num // replicate, **other_sizes}
    return replace(layout, sizes=sizes, data=("replicate", "shard"))


def shard(
    model: nn.Module,
    parts: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    policy: MixedPrecisionPolicy,
    reshard_after_forward: bool = True,
    offload: bool = False,
    keeps_root: bool = True,
) -> list[FSDPModule]:
    """Shards parts and model over the ranks of a mesh, in place: parameters become DTensors.

    Args:
        parts: parents before children, from `parts_of`.
        reshard_after_forward: whether to free a part between its forward and backward. The root's own
            parameters are kept if torch does so by default, because backward begins with them.
        offload: whether shards and their gradients stay on the host.
        keeps_root: False if no backward follows, so that the root's parameters are freed, too.

    Returns:
        The sharded modules: the same objects, with a changed class.
    """
    # fully_shard refuses other memory formats, such as channels_last (torch 2.13).
    for param in model.parameters():
        param.data = param.data.contiguous()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=accelerator.is_available())
    # Children first: a module that is sharded takes all parameters that aren't sharded yet.
    for part in reversed(parts):
        fully_shard(part, reshard_after_forward=reshard_after_forward, **options)
    of_root = (None if keeps_root else True) if reshard_after_forward else False
    fully_shard(model, reshard_after_forward=of_root, **options)
    # A model of peft generates with the forward of the wrapped model, not with its own.
    if hasattr(model, "peft_config") and hasattr(model, "generate"):
        register_fsdp_forward_method(model, "generate")
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _owns_its_parameters(submodule: nn.Module, model: nn.Module) -> bool:
    counts_inside = _holders(submodule)
    everywhere = _holders(model)
    return all(everywhere[param] == num for param, num in counts_inside.items())


def _holders(module: nn.Module) -> Counter[int]:
    """Counts in how many modules each parameter is, by its id."""
    return Counter(
        id(param) for submodule in module.modules() for param in submodule.parameters(recurse=False)
    )
