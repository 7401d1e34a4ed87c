"""Values survive a checkpoint's format; other objects are refused."""

from __future__ import annotations

import array
import collections
import enum

import numpy as np
import pytest
import torch

from eventloop.object_state.not_savable import NotSavableError
from eventloop.object_state.values import Encoder

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
    "numpy int": np.int16(-3),
    "numpy datetime": np.datetime64("2026-01-02"),
    "numpy array": np.arange(6.0).reshape(2, 3),
    "numpy strings": np.array(["a", "bcd"]),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_with_its_type(restored, name):
    """Also the type of a key, and the order of a dict."""
    value = VALUES[name]

    result = restored(value)

    assert type(result) is type(value)
    assert repr(result) == repr(value)


def test_an_object_that_is_met_twice_is_one_object_again(restored):
    """Also a container that holds itself."""
    shared, circle = [1], []
    circle += [circle, shared]

    first, second, again = restored([shared, shared, circle])

    assert first is second
    assert again[0] is again
    assert again[1] is first


def test_a_class_that_no_file_names_is_that_of_the_predecessor(restored):
    """Enums, named tuples and the factory of a defaultdict are code."""

    def make_list():
        return []

    default = collections.defaultdict(make_list, a=[1])

    assert restored(Color.BLUE, Color.RED) is Color.BLUE
    assert restored(Point(3, 4), Point(0, 0)) == Point(3, 4)
    assert restored(default, collections.defaultdict(make_list))["b"] == []
    for value in (Color.BLUE, Point(3, 4), default):
        with pytest.raises(NotSavableError, match="isn't saved"):
            restored(value)


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
        Encoder(lambda value: None).encode(value)
