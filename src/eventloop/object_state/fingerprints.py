"""Fingerprints: what differs if a value or the contents of an object have changed. No code of theirs runs."""

from __future__ import annotations

import array
import itertools
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from eventloop.devices import kind_of
from eventloop.object_state.entering import (
    CONTAINER_TYPES,
    PLAIN_TYPES,
    has_identity,
    is_numpy_scalar,
    is_seed_source,
)
from eventloop.object_state.generators import encode_seed_source
from eventloop.object_state.not_savable import NotSavableError
from eventloop.object_state.tensor_memory import is_plain_tensor
from eventloop.object_state.values import Encoder, plain_array
from eventloop.rng import is_generator

_NUM_SAMPLED = 4096  # entries of a large tensor, array or list of numbers
_NUM_SAMPLED_OBJECTS = 256  # entries of a long list of other things
_MAX_COMPARED = 1_000_000  # entries of a list of plain values


def fingerprint(value: Any) -> Any:
    """Returns what differs if a location has another value.

    An object is compared by its identity; see `fingerprint_of_contents` for what it holds.
    """
    kind = type(value)
    if kind in (float, complex):
        return kind, repr(value)  # a NaN isn't equal to itself
    if kind in PLAIN_TYPES:
        return kind, value
    if kind in (tuple, frozenset):
        return kind, _fingerprint_of_entries(value)
    if is_numpy_scalar(value):
        return kind, value.tobytes()
    if kind.__module__ in ("builtins", "itertools") and not has_identity(value):
        return _fingerprint_of_builtin(value)
    return kind, id(value)


def fingerprint_of_contents(value: Any) -> Any:
    """Returns what differs if a container, tensor, array or generator has other contents.

    Of large contents only some entries are compared.
    """
    kind = type(value)
    if kind in CONTAINER_TYPES:
        return len(value), _fingerprint_of_entries(value)
    if isinstance(value, Tensor):
        return _fingerprint_of_tensor(value)
    if is_generator(value):
        return None  # always saved
    if is_seed_source(value):
        return repr(encode_seed_source(value))
    if kind in (bytearray, array.array):
        return bytes(value)
    return _fingerprint_of_array(value)


def _fingerprint_of_entries(container: Any) -> Any:
    entries: Iterable[Any] = container
    if isinstance(container, dict):
        entries = itertools.chain(container.keys(), container.values())
    if isinstance(container, (set, frozenset)):
        return frozenset(map(fingerprint, container))
    entries = list(entries)
    if len(entries) > _NUM_SAMPLED:
        has_objects = not set(map(type, entries)) <= PLAIN_TYPES
        num_compared = _NUM_SAMPLED_OBJECTS if has_objects else _MAX_COMPARED
        entries = entries[:: 1 + len(entries) // num_compared]
        if not has_objects:
            return hash(tuple(entries))
    return tuple(map(fingerprint, entries))


def _fingerprint_of_tensor(tensor: Tensor) -> Any:
    version = None if tensor.is_inference() else tensor._version
    facts: tuple[Any, ...] = (tensor.dtype, tensor.requires_grad, version)
    if not is_plain_tensor(tensor):
        return facts
    facts = (*facts, tensor.shape, tensor.stride(), tensor.data_ptr())
    if not kind_of(tensor.device).is_host or not tensor.is_contiguous():
        return facts  # reading values would wait for the device
    flat = tensor.detach().flatten()
    sample = flat[:: max(1, len(flat) // _NUM_SAMPLED)].contiguous()
    return *facts, zlib.crc32(sample.view(torch.uint8).numpy().tobytes())


def _fingerprint_of_array(values: Any) -> Any:
    facts = values.shape, str(values.dtype)
    if values.dtype.hasobject:
        return *facts, tuple(map(fingerprint, values.flat)) if values.size < _NUM_SAMPLED else None
    flat = plain_array(values).reshape(-1)
    return *facts, zlib.crc32(flat[:: max(1, flat.size // _NUM_SAMPLED)].tobytes())


def _fingerprint_of_builtin(value: Any) -> Any:
    """Compares ranges and iterators by what would be saved of them."""
    try:
        return type(value), repr(Encoder(lambda entry: None).encode(value))
    except NotSavableError:
        return "object", id(value)
