"""Properties of ATen operators that the pretend device needs to compute them on the host."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eventloop_testing.pretend import generators, private
from eventloop_testing.pretend.errors import MixedDevicesError

aten = torch.ops.aten
_INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
_MASKS = (torch.bool, torch.uint8)
_SIZE_FOLLOWS_FROM_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Operator(NamedTuple):
    """The relevant properties of an operator's declaration.

    Args:
        name: without namespace and overload.
        written: positions and names of the arguments that it writes.
        outs: names of the arguments that receive its results.
        generator: position of its generator argument; None without one.
        is_random: whether it draws random numbers.
        has_to_wait: whether the host must know values to continue.
        changes_shape: whether it changes the shape of its first argument.
        takes_numbers: whether a zero-dimensional tensor on the host is accepted as a number, as on a GPU.
    """

    name: str
    written: frozenset[int | str]
    outs: tuple[str, ...]
    generator: int | None
    is_random: bool
    has_to_wait: bool
    changes_shape: bool
    takes_numbers: bool


@functools.cache
def described(func: Any) -> Operator:
    """Reads the declaration of an operator."""
    schema = private.schema_of(func)
    written: set[int | str] = set()
    generator = None
    for idx, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {idx, argument.name}
        if argument.name == "generator":
            generator = idx
    tags = set(func.tags)
    return Operator(
        schema.name.removeprefix("aten::"),
        frozenset(written),
        tuple(argument.name for argument in schema.arguments if argument.is_out),
        generator,
        torch.Tag.nondeterministic_seeded in tags,
        func not in _INDEXING and bool(tags & _SIZE_FOLLOWS_FROM_VALUES),
        torch.Tag.inplace_view in tags,
        torch.Tag.pointwise in tags and func is not aten.equal.default,
    )


def indexes_with_mask(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator selects values by a mask: the host must know the length of its result."""
    if func not in _INDEXING or _fills(args):
        return False
    return any(_is_mask(index) and not index.is_cpu for index in args[1])


class FromHost(NamedTuple):
    """The host tensors that an operator reads along with tensors of the device.

    Args:
        ids: ids of the tensors.
        has_to_wait: whether the host waits until they are copied.
    """

    ids: frozenset[int]
    has_to_wait: bool


def taken_from_host(func: Any, args: tuple[Any, ...]) -> FromHost:
    """Returns the host tensors with which a tensor of the device is indexed or filled, as on a GPU.

    A mask becomes positions in pinned memory, whose copy doesn't block; the copy of other indices blocks
    (torch 2.13, `at::native::expandTensors`). A number on the host may be assigned: with a single mask
    this is a fill, for which a tensor of shape (1,) is a number, too.
    """
    if func not in _INDEXING or args[0].is_cpu:
        return FromHost(frozenset(), False)
    fills = _fills(args)
    adds = len(args) > 3 and args[3]  # sorts positions, whose copy blocks
    host_tensors = [index for index in args[1] if isinstance(index, Tensor) and index.is_cpu]
    has_to_wait = any(adds or not _is_mask(index) for index in host_tensors)
    if len(args) > 2 and args[2].is_cpu and (fills or args[2].dim() == 0):
        host_tensors.append(args[2])
        has_to_wait |= not fills
    return FromHost(frozenset(map(id, host_tensors)), has_to_wait)


def _fills(args: tuple[Any, ...]) -> bool:
    """Whether `index_put` with these arguments fills where a single mask of the device is true."""
    indices = [index for index in args[1] if isinstance(index, Tensor)]
    is_number = len(args) > 2 and args[2].numel() == 1 and not (len(args) > 3 and args[3])
    return is_number and len(indices) == 1 and _is_mask(indices[0]) and not indices[0].is_cpu


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in _MASKS


def point_to_host(kwargs: dict[str, Any]) -> bool:
    """Makes an operator compute on the host; returns whether its result stays there."""
    device = kwargs.get("device")
    if device is None:
        return False
    kwargs["device"] = torch.device("cpu")
    return torch.device(device).type == "cpu"


def compute(func: Any, operator: Operator, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Computes on the host; random operators draw from the device's generators."""
    if operator.generator is not None:
        _give_generator(func, operator.generator, args, kwargs)
    elif operator.is_random:
        with generators.in_place_of_the_hosts():
            return func(*args, **kwargs)
    return func(*args, **kwargs)


def _give_generator(func: Any, idx: int, args: list[Any], kwargs: dict[str, Any]) -> None:
    generator = args[idx] if len(args) > idx else kwargs.get("generator")
    if generator is not None and not generators.is_of_device(generator):
        raise MixedDevicesError(
            f"{func} was given a generator of the host; make one with "
            'torch.Generator(device="pretend")'
        )
    if len(args) > idx:
        args[idx] = generator or generators.default()
    else:
        kwargs["generator"] = generator or generators.default()
