"""Values survive a checkpoint's format; a nest that no value has is refused."""

from __future__ import annotations

import array
import collections
import enum
import itertools
import json
import random

import numpy as np
import pytest
import torch

from eventloop.checkpoint.encoding import flatten, restore
from eventloop.object_state.values import Decoder, Encoder, NotSavableError, laid_out

Point = collections.namedtuple("Point", "x y")


class Color(enum.Enum):
    RED = 1
    BLUE = 2


VALUES = {
    "nested": {"a": [1, (2.5, {"b": {3, 4}})], 5: None},
    "int keys and tuples": {(1, "x"): 2, True: 3},
    "deque": collections.deque([1, 2], maxlen=4),
    "counter": collections.Counter("abca"),
    "ordered": collections.OrderedDict(b=1, a=2),
    "frozenset": frozenset({1, 2}),
    "long list": list(range(100)),
    "long floats": [idx / 7 for idx in range(100)],
    "huge int": 2**200,
    "nan": float("nan"),
    "complex": 1 + 2j,
    "bytes": b"\0ab",
    "bytearray": bytearray(b"ab"),
    "array": array.array("d", [1.5]),
    "range": range(1, 10, 3),
    "shape": torch.Size([2, 3]),
    "device": torch.device("cpu"),
    "dtype": torch.bfloat16,
    "memory format": torch.channels_last,
    "layout": torch.sparse_csr,
    "numpy int": np.int16(-3),
    "numpy datetime": np.datetime64("2026-01-02"),
    "numpy array": np.arange(6.0).reshape(2, 3),
    "numpy strings": np.array(["a", "bcd"]),
}


def through_a_file(nest):
    """Returns a nest as a checkpoint gives it back."""
    tensors, skeleton = flatten({"nest": nest}, "state")
    return restore(json.loads(json.dumps(skeleton)), tensors)["nest"]


def encoded(value):
    return through_a_file(Encoder(lambda value: None).encode(value))


def decoded(nest, predecessor=None):
    return Decoder({}, torch.device("cpu")).decode(nest, predecessor)


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_with_its_type(name):
    """Also the type of a key, and the order of a dict."""
    value = VALUES[name]

    result = decoded(encoded(value))

    assert type(result) is type(value)
    assert repr(result) == repr(value)


def test_an_object_that_is_met_twice_is_one_object_again():
    """Also a container that holds itself."""
    shared, circle = [1], []
    circle += [circle, shared]

    first, second, again = decoded(encoded([shared, shared, circle]))

    assert first is second
    assert again[0] is again
    assert again[1] is first


def test_a_class_that_no_file_names_is_that_of_the_predecessor():
    """Enums, named tuples and the factory of a defaultdict are code."""

    def make_list():
        return []

    default = collections.defaultdict(make_list, a=[1])

    assert decoded(encoded(Color.BLUE), Color.RED) is Color.BLUE
    assert decoded(encoded(Point(3, 4)), Point(0, 0)) == Point(3, 4)
    assert decoded(encoded(default), collections.defaultdict(make_list))["b"] == []
    for value in (Color.BLUE, Point(3, 4), default):
        with pytest.raises(NotSavableError, match="isn't saved"):
            decoded(encoded(value))


@pytest.mark.parametrize(
    "make",
    [
        lambda: random.Random(3),
        lambda: np.random.RandomState(3),
        lambda: np.random.default_rng(3),
        lambda: np.random.Generator(np.random.SFC64(3)),
    ],
)
def test_a_generator_goes_on(make):
    """Made anew, where the place held none."""
    generator = make()
    generator.random()

    assert decoded(encoded(generator)).random() == generator.random()


def test_a_generator_of_torch_goes_on():
    """It has other methods."""
    generator = torch.Generator().manual_seed(3)
    nest = encoded(generator)

    assert torch.equal(torch.rand(5, generator=decoded(nest)), torch.rand(5, generator=generator))


def test_iterators_with_a_position_go_on():
    """Of built-in sequences, and those of itertools whose position can be read."""
    numbers = [3, 4, 5]
    iterators = [iter(numbers), iter(range(9)), itertools.count(2, 3), itertools.cycle("ab")]
    for iterator in iterators:
        next(iterator)

    results = decoded(encoded(iterators))

    assert [[next(each), next(each)] for each in results] == [
        [next(each), next(each)] for each in iterators
    ]


class OtherTensor(torch.Tensor):
    """May mean other things by its values than a plain tensor."""


@pytest.mark.parametrize(
    "value",
    [
        (number for number in range(3)),
        zip([1], [2], strict=True),
        lambda: 1,
        object(),
        np.array([object()]),
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(2, device="meta"),
        torch.zeros(2).as_subclass(OtherTensor),
        [{"deep": open}],
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_can_not_be_saved_is_refused(value):
    """Wherever it is."""
    with pytest.raises(NotSavableError, match="it holds a"):
        encoded(value)


@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 4, 5), (1, 5), (0, 3)])
def test_a_tensor_keeps_its_memory_format(shape):
    """Sums over it would otherwise be of another order."""
    tensor = torch.randn(shape).transpose(0, -1)

    result = decoded(encoded(tensor))

    assert result.stride() == tensor.stride() or result.numel() == 0
    assert torch.equal(result, tensor)


@pytest.mark.parametrize("strides", [(0, 0), (1, 1), (100, 1), (1,)])
def test_strides_that_do_not_fill_memory_are_not_taken(strides):
    """They come from a file; an expanded tensor becomes a whole one."""
    values = torch.arange(6.0).reshape(2, 3)

    try:
        result = laid_out(values, strides, torch.device("cpu"))
    except ValueError:
        return
    assert torch.equal(result, values)
    assert result.is_contiguous()


HOSTILE = {
    "unknown kind": {"kind": "module", "name": "os", "number": 0},
    "object dtype": {"kind": "numpy array", "number": 0,
                     "values": {"array": "O", "shape": [1], "bytes": torch.zeros(8, dtype=torch.uint8)}},
    "structured dtype": {"kind": "numpy array", "number": 0,
                         "values": {"array": "i4,O", "shape": [1], "bytes": torch.zeros(12, dtype=torch.uint8)}},
    "bit generator": {"kind": "generator", "library": "numpy", "bits": "system", "state": {}, "number": 0},
    "array of characters": {"kind": "array", "typecode": "u", "bytes": b"abcd", "number": 0},
    "iterator over a dict": {"kind": "iterator", "number": 1, "position": 0,
                             "over": {"kind": "dict", "keys": [], "items": [], "number": 0}},
    "huge range in a position": {"kind": "iterator", "number": 0, "position": 2.5, "over": "abc"},
    "constant": {"kind": "torch constant", "name": "torch.load", "number": 0},
    "shape of words": {"kind": "size", "items": ["a"], "number": 0},
    "reference": {"kind": "same", "number": 7},
    "unknown object": {"kind": "object", "path": "os.system"},
    "no kind": {"number": 0},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_nest_that_no_run_writes_is_refused(name):
    """Nothing is looked up by a name from a file, imported or called."""
    with pytest.raises((NotSavableError, LookupError, TypeError, ValueError)):
        decoded(HOSTILE[name])
