"""Which submodules are sharded each by itself, and how that is done; free of hooks.

A part is gathered as a whole when its forward or backward begins, and given up afterwards. What is
in no part belongs to the root and is gathered for as long as the whole model computes.

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
    """Returns the submodules to shard each by itself, parents before children.

    Args:
        class_names: the classes of these submodules; None for those that repeat: the outermost
            members of a container that have a sibling of their class. A member that shares
            parameters with the rest of the model is left to the root.

    Raises:
        SettingError: no module is of a class, or its parameters belong to other modules, too.
    """
    if class_names is None:
        return [one for one in repeated_layers(model) if _owns_its_parameters(one, model)]
    modules = [one for one in model.modules() if one is not model]
    found = [one for one in modules if type(one).__name__ in class_names]
    unknown = set(class_names) - {type(one).__name__ for one in found}
    for name in sorted(unknown):
        raise SettingError(
            f"layers: the model has no submodule of class {name!r}"
            f"{closest(name, {type(one).__name__ for one in modules})}",
            fix="name a class of the model's parts, or leave layers out",
        )
    for one in found:
        if not _owns_its_parameters(one, model):
            raise SettingError(
                f"layers: a {type(one).__name__} shares parameters with the rest of the model, so "
                "that it can't be sharded by itself",
                fix="leave this class out; the root holds what isn't in a part",
            )
    return found


def with_copies(layout: Layout, replicate: int) -> Layout:
    """Returns a layout whose samples go to copies of the model, each on ranks that follow each other.

    Raises:
        SettingError: they can't be of one size.
    """
    num = layout.data_world_size
    if replicate < 1 or num % replicate:
        raise SettingError(
            f"replicate={replicate}: {num} ranks can't hold as many copies of one size",
            fix=f"give a number that divides {num}, or leave replicate out",
        )
    others = {name: size for name, size in layout.sizes.items() if name not in layout.data}
    sizes = {"replicate": replicate, "shard": num // replicate, **others}
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
    """Shards parts and model over the ranks of a mesh, in place: their parameters are DTensors.

    Args:
        parts: parents before children, as `parts_of` gives them.
        reshard_after_forward: whether a part is given up between its forward and its backward.
            The root's own parameters are kept where that is torch's way: backward begins there.
        offload: whether shards and their gradients stay on the host.
        keeps_root: False where no backward follows, so that the root's are given up, too.

    Returns:
        Parts and model as what they have become; they keep their names, and are the same objects.
    """
    # Others, channels_last among them, fully_shard refuses (torch 2.13).
    for param in model.parameters():
        param.data = param.data.contiguous()
    given: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    if offload:
        given["offload_policy"] = CPUOffloadPolicy(pin_memory=accelerator.is_available())
    # The first module to be sharded owns its parameters alone.
    for one in reversed(parts):
        fully_shard(one, reshard_after_forward=reshard_after_forward, **given)
    of_root = (None if keeps_root else True) if reshard_after_forward else False
    fully_shard(model, reshard_after_forward=of_root, **given)
    # A model of peft generates by the forward pass of what it wraps, not by its own.
    if hasattr(model, "peft_config") and hasattr(model, "generate"):
        register_fsdp_forward_method(model, "generate")
    return [one for one in model.modules() if isinstance(one, FSDPModule)]


def _owns_its_parameters(part: nn.Module, model: nn.Module) -> bool:
    inside = _holders(part)
    everywhere = _holders(model)
    return all(everywhere[param] == num for param, num in inside.items())


def _holders(module: nn.Module) -> Counter[int]:
    """Counts in how many modules each parameter is, by its id."""
    return Counter(id(param) for one in module.modules() for param in one.parameters(recurse=False))
