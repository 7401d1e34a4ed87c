"""Fingerprints of values and of contents of objects, which detect changes without running their code."""

from __future__ import annotations

import array
import gc
import itertools
import operator
import sys
import types
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eventloop.devices import kind_of
from eventloop.object_state.attributes import attributes_in, attributes_of
from eventloop.object_state.entering import (
    CONTAINER_TYPES,
    MAX_ENTRIES,
    PLAIN_TYPES,
    has_identity,
    is_c_number,
    is_entered,
    is_entered_class,
    is_numpy_scalar,
    is_seed_source,
    is_stdlib_instance,
)
from eventloop.object_state.generators import encode_seed_source
from eventloop.object_state.not_savable import NotSavableError
from eventloop.object_state.tensor_memory import MAX_BYTES, is_plain_tensor
from eventloop.object_state.torch_values import TORCH_VALUES
from eventloop.object_state.values import Encoder, plain_array
from eventloop.rng import is_generator

_NUM_SAMPLED = 4096  # entries of a large tensor or array, and of a long list of plain values
_MAX_COMPARED = 1_000_000  # entries of a long container
_MAX_REFERENCES = 8 * _MAX_COMPARED


class Identities:
    """A sequence of objects that is compared by identity, except for plain values.

    Holds references to the objects, since Python uses the id of a deleted object again, often
    immediately.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identities) or len(self._values) != len(other._values):
            return False
        # The usual case; a hundred times as fast as the comparison below.
        if all(map(operator.is_, self._values, other._values)):
            return True
        return all(map(_is_same, self._values, other._values))

    def __hash__(self) -> int:
        return hash(tuple(map(type, self._values)))

    def differs_in_numbers(self, other: Identities) -> bool:
        """Returns whether a number was replaced by another number."""
        for value, other_value in zip(self._values, other._values, strict=False):
            if value is other_value:  # also the same NaN, which isn't equal to itself
                continue
            if type(value) in _NUMBERS and type(other_value) in _NUMBERS and value != other_value:
                return True
        return False


class Many(NamedTuple):
    """The fingerprint of many objects.

    Attributes:
        references: the objects, and the objects that they refer to.
        contents: the fingerprints of tensors, arrays and generators among `references`.
    """

    references: Identities
    contents: list[Any]

    def differs_in_numbers(self, other: Many | None) -> bool:
        """Returns whether numbers have changed; any other change of a data set is taken for a cache."""
        return other is not None and self.references.differs_in_numbers(other.references)


_NUMBERS = (int, float, bool)


def _is_same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    return type(value) is type(other) and type(value) in PLAIN_TYPES and bool(value == other)


def fingerprint(value: Any) -> Any:
    """Returns a fingerprint that differs if a location gets another value.

    Objects are compared by identity; use `fingerprint_of_contents` to compare their contents.
    """
    kind = type(value)
    if kind in (float, complex):
        return kind, repr(value)  # a NaN isn't equal to itself
    if kind in PLAIN_TYPES or kind in TORCH_VALUES:
        return kind, value
    if kind in (tuple, frozenset):
        return kind, _fingerprint_of_entries(value)
    if is_numpy_scalar(value):
        return kind, value.tobytes()
    if has_identity(value):
        return Identities((value,))
    if kind in (types.FunctionType, types.ModuleType):
        return Identities((value,))
    if kind.__module__ in ("builtins", "itertools"):
        return _fingerprint_of_builtin(value)
    if is_stdlib_instance(value) and not is_entered(value):
        return _fingerprint_of_stdlib(value)
    if hasattr(kind, "hexdigest") and kind.__module__ in sys.stdlib_module_names:
        has_any_length = kind.__name__ == "HASHXOF" or kind.__name__.startswith("shake")
        return kind, value.digest(16) if has_any_length else value.digest()
    return Identities((value,))


def fingerprint_of_contents(value: Any, visited: Collection[int] = ()) -> Any:
    """Returns a fingerprint that differs if the contents of a container, tensor or array change.

    Args:
        visited: ids of objects that have their own fingerprints.
    """
    kind = type(value)
    if kind in CONTAINER_TYPES:
        return len(value), _fingerprint_of_entries(value, visited)
    if isinstance(value, Tensor):
        return _fingerprint_of_tensor(value)
    if is_generator(value):
        return None  # the states of generators are always saved
    if is_seed_source(value):
        return repr(encode_seed_source(value))
    if kind in (bytearray, array.array) or is_c_number(value):
        return bytes(value)
    return _fingerprint_of_array(value, visited)


def fingerprint_of_many(objects: Iterable[Any], visited: Collection[int] = ()) -> Many:
    """Returns a fingerprint that differs if any of many objects, or an object in them, changes.

    Uses the garbage collector's references, which is a hundred times as fast as a walk and sufficient
    to detect a change. The references must have the same layout each time, but CPython creates the
    `__dict__` of an instance only on first access, so `_holders_in` accesses it.
    """
    layer = list(itertools.islice(objects, _MAX_COMPARED))
    references = [*layer]
    contents: list[Any] = []
    visited_ids = set(visited)
    while layer and len(references) <= _MAX_REFERENCES:
        samples = dict(zip(map(type, layer), layer, strict=True))  # an instance of each class
        contents += _contents_in(layer, samples)
        holders = _holders_in(layer, samples.keys(), visited_ids)
        visited_ids.update(map(id, holders))
        layer = gc.get_referents(*holders)
        references += layer
    return Many(Identities(references), contents)


def _contents_in(layer: list[Any], samples: Mapping[type, Any]) -> list[Any]:
    """Returns fingerprints of tensors, arrays and iterators, which change without new references."""
    kinds = {
        kind
        for kind, sample in samples.items()
        if kind not in CONTAINER_TYPES and (has_identity(sample) or isinstance(sample, Iterator))
    }
    if not kinds:
        return []
    fingerprints = []
    for value in layer:
        if type(value) not in kinds:
            continue
        if has_identity(value) and not is_generator(value):
            fingerprints.append(fingerprint_of_contents(value))
        else:
            # Positions of generators and iterators aren't compared; they always count as changed.
            fingerprints.append(object())
    return fingerprints


def _holders_in(layer: list[Any], kinds: Collection[Any], visited_ids: set[int]) -> list[Any]:
    """Returns the unvisited objects of a layer that refer to other objects, each once."""
    followed = {kind for kind in kinds if kind in CONTAINER_TYPES or is_entered_class(kind)}
    holders = layer
    if len(followed) < len(kinds):
        holders = [value for value in layer if type(value) in followed]
    identities = set(map(id, holders))
    if len(identities) < len(holders) or not identities.isdisjoint(visited_ids):
        unvisited = {id(value): value for value in holders if id(value) not in visited_ids}
        holders = list(unvisited.values())
    if any(kind.__dictoffset__ for kind in followed):
        # Makes CPython create each `__dict__`, so that the references are the same each time.
        for holder in holders:
            attributes_of(holder)
    return holders


def _fingerprint_of_entries(container: Any, visited: Collection[int] = ()) -> Any:
    entries = list(container)
    if isinstance(container, dict):
        entries += container.values()
    if len(container) > MAX_ENTRIES:  # a walk doesn't enter its entries
        is_plain = set(map(type, entries)) <= PLAIN_TYPES
        if is_plain and isinstance(container, (set, frozenset)):
            return frozenset(entries)
        entries = entries[:: 1 + len(entries) // _MAX_COMPARED]
        return hash(tuple(entries)) if is_plain else fingerprint_of_many(entries, visited)
    is_ordered = not isinstance(container, (set, frozenset))
    return (tuple if is_ordered else frozenset)(map(fingerprint, entries))


def _fingerprint_of_tensor(tensor: Tensor) -> Any:
    # Tensors that were created in inference mode have no version counter.
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


def _fingerprint_of_array(values: Any, visited: Collection[int]) -> Any:
    facts = values.shape, str(values.dtype)
    if values.dtype.hasobject:
        if values.size > MAX_ENTRIES:
            return *facts, fingerprint_of_many(values.flat, visited)
        return *facts, tuple(map(fingerprint, values.flat))
    flat = plain_array(values).reshape(-1)
    # An array has no version counter. If it is small enough to be saved, all of it is compared.
    step = 1 if values.nbytes <= MAX_BYTES else flat.size // _NUM_SAMPLED
    return *facts, zlib.crc32(flat[::step].tobytes())


def _fingerprint_of_stdlib(value: Any) -> Any:
    """Returns a fingerprint of the attributes of a standard library object.

    Such an object can't be saved, but its change can be reported.
    """
    locations = attributes_in(value, "")
    values = [location.value for location in locations]
    return Identities((value,)), fingerprint_of_many(values)


def _fingerprint_of_builtin(value: Any) -> Any:
    """Returns the encoded value of a range or an iterator; its identity if it can't be encoded."""
    try:
        return type(value), repr(Encoder(lambda entry: None).encode(value))
    except NotSavableError:
        return Identities((value,))
