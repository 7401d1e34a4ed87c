"""Model surgery: replaces layers anywhere in a model.

Attributes:
    Factory: The type of a function that takes a module and returns its replacement, or None.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

Factory = Callable[[Any], nn.Module | None]
Made = TypeVar("Made", bound=nn.Module)


class Surgery(NamedTuple):
    """The result of `replace_modules`.

    Args:
        model: another object only if the model itself was replaced.
        replaced: the replaced modules by name; a shared module under each of its names.
    """

    model: nn.Module
    replaced: dict[str, nn.Module]


def replace_modules(model: nn.Module, factories: Mapping[type[nn.Module], Factory]) -> Surgery:
    """Replaces the modules of some classes, in place, before optimizers are built over parameters.

    A module is replaced if its class is exactly one of these, as a subclass may compute something
    else. So replacements of another class aren't replaced by a second call. Children are replaced
    before their parents, otherwise in order of registration; a shared module gets one shared
    replacement.

    A replacement gets the training mode of the old module. Its new parameters and buffers get the
    device and, if both are floating-point, the dtype of the old module, or else of the model; a new
    parameter is frozen if the old one of that name was. Tensors taken over from the old module stay
    the same objects.

    Args:
        factories: for each class, a function of a module that returns its replacement, or None to
            keep it.

    Raises:
        TypeError: a factory returns something else.
    """
    by_old: dict[nn.Module, nn.Module] = {}
    replaced = {}
    for name, old in list(_inside_out(model)):
        factory = factories.get(type(old))
        if factory is None:
            continue
        if old not in by_old:
            by_old[old] = _made(factory, old, model)
        new = by_old[old]
        if new is old:
            continue
        replaced[name] = old
        parent, _, child = name.rpartition(".")
        if name:
            setattr(model.get_submodule(parent), child, new)
    return Surgery(by_old.get(model, model), replaced)


def with_class(module: nn.Module, kind: type[Made]) -> Made:
    """Returns a module of another class with the contents of a module.

    Parameters, buffers, children, hooks and attributes are the same objects under the same names;
    state dicts don't change. `kind.__init__` isn't called.

    Args:
        kind: usually a subclass of the module's class.
    """
    made = kind.__new__(kind)
    # The containers are copied, so that what is registered with one isn't with the other.
    made.__dict__ = {
        name: copy.copy(value) if isinstance(value, dict | set) else value
        for name, value in vars(module).items()
    }
    return made


def _inside_out(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields the descendants of a module, under each of their names, and then the module."""
    for child, inner in module._modules.items():  # named_children leaves out what comes again
        if inner is not None:
            yield from _inside_out(inner, f"{name}.{child}" if name else child)
    yield name, module


def _made(factory: Factory, old: nn.Module, model: nn.Module) -> nn.Module:
    new = factory(old)
    if new is None or new is old:
        return old
    if not isinstance(new, nn.Module):
        raise TypeError(
            f"the factory for {type(old).__name__} gave {new!r}; it must give an nn.Module, or None "
            "to leave the module as it is"
        )
    _fit(new, old, model)
    return new


def _fit(new: nn.Module, old: nn.Module, model: nn.Module) -> None:
    """Moves a new module to the device, dtype, mode and `requires_grad` of the old one."""
    old_ids = {id(one) for one in (*old.modules(), *_tensors(old))}
    for module in new.modules():
        if id(module) not in old_ids:
            module.training = old.training
    like = next(
        (one for one in (*_tensors(old), *_tensors(model)) if one.is_floating_point()), None
    )
    frozen = {name for name, param in old.named_parameters() if not param.requires_grad}
    for name, param in new.named_parameters():
        if id(param) not in old_ids and name in frozen:
            param.requires_grad_(False)
    if like is not None:
        _move(new, like, old_ids)


def _move(new: nn.Module, like: Tensor, old_ids: set[int]) -> None:
    moved: dict[Tensor, Tensor] = {}  # a tensor in two places stays one
    for module in new.modules():
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for name, tensor in own:
            dtype = like.dtype if tensor.is_floating_point() else tensor.dtype
            if id(tensor) not in old_ids and (tensor.device, tensor.dtype) != (like.device, dtype):
                if tensor not in moved:
                    moved[tensor] = _moved(tensor, like.device, dtype)
                setattr(module, name, moved[tensor])


def _moved(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    moved = tensor.detach().to(device, dtype)
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
