"""Nests: what goes in comes out, to the bit; anything else is named with its path."""

from __future__ import annotations

import datetime
import enum
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from eventloop.checkpoint.encoding import MAX_DEPTH, flatten, is_plain, restore
from eventloop.errors import CheckpointError
from eventloop.files import disk
from eventloop.files.disk import CorruptFileError

text = st.text(st.characters(exclude_categories=()), max_size=5)  # lone surrogates, too
keys = text | st.integers() | st.sampled_from(["$tensor", "$dict", "$", "a.b", ""])
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=2**62).map(lambda number: number**9)
    | st.floats()
    | text
    | st.binary(max_size=5)
    | st.lists(st.integers(-128, 127), max_size=3).map(lambda n: torch.tensor(n, dtype=torch.int8))
)
nests = st.recursive(
    leaves,
    lambda below: (
        st.lists(below, max_size=3)
        | st.lists(below, max_size=3).map(tuple)
        | st.dictionaries(keys, below, max_size=3)
    ),
    max_leaves=12,
)


def there_and_back(nest):
    """Goes through the bytes of the JSON, as a file does."""
    tensors, skeleton = flatten(nest, "nest")
    return restore(disk.from_json(disk.to_json(skeleton)), tensors)


@given(nests)
def test_every_nest_comes_back(same, nest):
    """Type by type and bit by bit: a resumed run can't tell the difference."""
    assert same(there_and_back(nest), nest)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1], (1,)),
        ({1: 2}, {"1": 2}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (0.0, -0.0),
        (True, 1),
        (1, 1.0),
        (b"a", "a"),
        (torch.zeros(1), -torch.zeros(1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(1, 2), torch.zeros(2)),
    ],
)
def test_what_is_nearly_the_same_is_not(same, one, other):
    """The negative control of the comparison that these tests make."""
    assert not same(one, other)
    assert same(one, one)
    assert same(there_and_back(other), other)


def test_tensors_are_named_by_their_keys():
    """Somebody may look into the file with other tools."""
    tensors, _ = flatten({"groups": [{"0.w": torch.ones(1)}, {1: torch.zeros(1)}]}, "nest")

    assert list(tensors) == ["groups.0.0.w", "groups.1.1"]


def test_names_that_would_be_equal_are_told_apart(same):
    """Dots may be part of a key; safetensors keeps a name for itself."""
    one = torch.arange(6).unbind()
    nest = {"a": {"b": one[0]}, "a.b": one[1], "a.b#2": one[2], "": one[3], "__metadata__": one[4]}
    nest |= {"\ud800": one[5]}

    assert len(flatten(nest, "nest")[0]) == 6
    assert same(there_and_back(nest), nest)


def test_a_flat_dict_of_tensors_needs_no_skeleton():
    """The weights of a model are a file that every tool reads, and nothing else."""
    for nest, expected in [
        ({"a.b": torch.ones(1)}, True),
        ({"a": {"b": torch.ones(1)}}, False),
        ({"__metadata__": torch.ones(1)}, False),
        ({"a": torch.ones(1), "b": 1}, False),
        ({0: torch.ones(1)}, False),
        ({}, False),
    ]:
        tensors, skeleton = flatten(nest, "nest")

        assert is_plain(skeleton, tensors) == expected


def test_subclasses_of_dict_become_dicts(same):
    """Schedulers and models give them."""
    nest = [OrderedDict(b=1, a=2), defaultdict(list, a=[1]), Counter([3, 3])]

    assert same(there_and_back(nest), [{"b": 1, "a": 2}, {"a": [1]}, {3: 2}])


def test_scalars_of_numpy_become_those_of_python(same):
    """Schedulers calculate with them."""
    nest = [np.float32(0.5), np.float64("nan"), np.int64(-1), np.bool_(True), np.str_("a")]

    assert same(there_and_back(nest), [0.5, float("nan"), -1, True, "a"])


def test_parameters_become_tensors(same):
    """A gradient belongs to the run that computes it."""
    (value,) = there_and_back([nn.Parameter(torch.ones(2))])

    assert type(value) is torch.Tensor
    assert not value.requires_grad


class Colour(enum.StrEnum):
    RED = "red"


class Tagged(torch.Tensor):
    """A tensor that means more than its values, as one spread over ranks does."""


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "an object"),
        ({1, 2}, "a set"),
        (1j, "a complex"),
        (np.ones(3), "a numpy.ndarray"),
        (np.datetime64(1, "s"), "a numpy.datetime64"),
        (np.longdouble(1), "a numpy.longdouble"),
        (torch.float32, "a torch.dtype"),
        (namedtuple("Point", "x")(1), "Point"),
        (Colour.RED, "Colour"),
        (datetime.date(2020, 1, 1), "a datetime.date"),
        (nn.Linear(1, 1), "a torch.nn.modules.linear.Linear"),
        (torch.ones(2).as_subclass(Tagged), "Tagged"),
        (torch.ones(2).to_sparse(), "torch.sparse_coo"),
        (torch.ones(2, device="meta"), "without values"),
        ({True: 1}, "a dict with the key 'True'"),
        ({0.5: 1}, "a dict with the key '0.5'"),
        ({(1, 2): 1}, "a dict with the key '(1, 2)'"),
    ],
)
def test_what_can_not_be_saved_is_named_with_its_path(value, kind):
    """Found before anything is written, and found by whoever has to fix it."""
    nest = {"ema": {"state": {"shadow": [0, 1, 2, value], "a b": 1, 3: 1}}}

    with pytest.raises(CheckpointError) as caught:
        flatten(nest, "plugins")

    assert "'plugins.ema.state.shadow[3]' can't be saved: it is" in caught.value.what
    assert kind in caught.value.what
    assert "fix" in str(caught.value)


def test_a_path_can_be_read_back():
    """Keys that aren't words stand in brackets, as in Python."""
    with pytest.raises(CheckpointError, match=r"part\['a b'\]\[3\]\.0\.weight\[0\]\" can't"):
        flatten({"a b": {3: {"0.weight": [object()]}}}, "part")


def test_depth_is_limited_both_ways(same):
    """What contains itself is found, and a hostile file ends no process."""
    nest = torch.ones(1)
    for _ in range(MAX_DEPTH):
        nest = {1: nest}
    itself = []
    itself.append(itself)

    assert same(there_and_back(nest), nest)
    for deeper in (itself, [nest]):
        with pytest.raises(CheckpointError, match="more than 64 levels deep"):
            flatten(deeper, "nest")
    skeleton = []
    for _ in range(MAX_DEPTH):
        skeleton = [skeleton]
    with pytest.raises(CorruptFileError, match="more than 64 levels deep"):
        restore([skeleton], {})


@pytest.mark.parametrize(
    "skeleton",
    [
        {"$tensor": "b"},
        {"$tensor": 3},
        [{"$tensor": "a"}, {"$tensor": "a"}],
        [],
        {"$python/object": "os.system"},
        {"$tuple": {}},
        {"$float": "1.5"},
        {"$float": 1},
        {"$int": "12"},
        {"$int": "0x" + "g"},
        {"$bytes": "?"},
        {"$bytes": "ü"},
        {"$dict": [[1]]},
        {"$dict": [[[], 1]]},
        {"$dict": [1]},
        {"$dict": [[{"$tensor": "a"}, 1]]},
        {"$float": "nan", "b": 1},
        {"b": 1, "$float": "nan"},
    ],
)
def test_a_skeleton_of_anything_else_is_damage(skeleton):
    """It comes from a file that anybody may have written."""
    with pytest.raises(CorruptFileError):
        restore(skeleton, {"a": torch.ones(1)})
