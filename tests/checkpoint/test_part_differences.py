"""What differs between two checkpoints."""

from __future__ import annotations

import math

import pytest
import torch

from eventloop.checkpoint.part_differences import ValueDifference, differences

NAN = float("nan")


def found(one, other, **given):
    return list(differences({"a": one}, {"a": other}, **given))


def test_equal_parts_have_no_difference(parts):
    """NaN, zeros with a sign and tensors of every kind included."""
    parts["more"] = {"nan": torch.tensor([NAN]), "zero": -0.0, 0: (1, [2]), "none": [], "t": ()}

    assert list(differences(parts, parts)) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        (NAN, 0.0),
        (None, 0),
        ("a", b"a"),
        ([1], (1,)),
        ([], ()),
        ([], None),
        ({}, []),
        ({0: 1}, {"0": 1}),
        ([1], {0: 1}),
        ([1], [1, 2]),
        ({"b": None}, {}),
        (2**100, 2**100 + 1),
        (torch.tensor(1), 1),
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (torch.tensor(1), torch.tensor(1, dtype=torch.int32)),
        (torch.zeros(2, 1), torch.zeros(1, 2)),
        (torch.zeros(2), torch.zeros(3)),
        ("not there", {}),
    ],
)
def test_every_other_bit_or_type_is_a_difference(one, other):
    """What isn't told of would be taken for the same."""
    assert found(one, other)
    assert found(other, one)


def test_a_difference_has_its_path_and_both_values():
    """Keys on the way, and what stands there in a few words."""
    one = {"b": [1, {"c": "x" * 99}], 7: True}

    nested, flag = found(one, {"b": [1, {"c": torch.zeros(2, 3)}], 7: False})

    assert nested.path == "a/b/1/c"
    assert len(nested.first) == 60
    assert nested.second == "float32[2, 3]"
    assert flag == ValueDifference("a/7", "True", "False")


def test_what_one_of_them_lacks_is_one_difference():
    """A plugin's whole state, say, and not a line for each number in it."""
    assert found({"ema": {"step": 1, "decay": 0.9}}, {}) == [
        ValueDifference("a/ema", "dict of 2", "not there")
    ]


@pytest.mark.parametrize(
    ("one", "other", "largest"),
    [
        ([1.0, 2.0, NAN], [1.5, -2.0, NAN], 4.0),
        ([0.0], [-0.0], 0.0),
        ([math.inf, -math.inf, 1.0], [math.inf, -math.inf, 2.0], 1.0),
        ([math.inf], [-math.inf], math.inf),
        ([1.0, 5.0], [NAN, 6.0], NAN),
    ],
)
def test_the_largest_difference_of_two_tensors_is_found(one, other, largest):
    """Infinities that agree don't hide it, a NaN does show."""
    (difference,) = found(torch.tensor(one), torch.tensor(other))

    assert difference.largest == pytest.approx(largest, nan_ok=True, rel=0, abs=0)


@pytest.mark.parametrize(
    ("one", "largest"),
    [
        (torch.tensor([True]), 1.0),
        (torch.tensor([255], dtype=torch.uint8), 255.0),
        (torch.tensor([3 + 4j], dtype=torch.complex64), 4.0),
        (torch.tensor([0.5], dtype=torch.bfloat16), 0.5),
        (torch.tensor([1.5]).to(torch.float8_e4m3fn), 1.5),
    ],
)
def test_tensors_of_every_kind_can_be_compared(one, largest):
    """Complex ones by their parts; bytes don't wrap around."""
    (difference,) = found(one, torch.zeros(1).to(one.dtype))

    assert difference.largest == largest


def test_large_ints_that_float64_cannot_tell_apart_do_differ():
    """A difference of nothing would look like a mistake."""
    (difference,) = found(torch.tensor([2**62]), torch.tensor([2**62 + 1]))

    assert difference.largest == 1.0


def test_the_largest_difference_may_stand_anywhere(monkeypatch):
    """Large tensors are compared piece by piece."""
    monkeypatch.setattr("eventloop.checkpoint.part_differences._CHUNK", 3)
    one, other = torch.zeros(8), torch.zeros(8)
    other[[1, 4, 7]] = torch.tensor([1.0, 3.0, 2.0])

    assert found(one, other)[0].largest == 3.0


def test_seconds_count_only_where_they_are_asked_for():
    """No two runs share them, and they change nothing; a tensor of that name isn't a time."""
    clock = {"now": [1, 3, 12, 0, 0.25], "previous": [0, 2, 8, 0, 0.125]}
    later = {"now": [1, 3, 12, 0, 0.5], "previous": [0, 2, 8, 0, 0.375]}
    one = {"training": {"clock": clock, "history": [{"seconds": 1.0}]}}
    other = {"training": {"clock": later, "history": [{"seconds": 2.0}]}}
    weights = [{"model": {"seconds": torch.full((1,), value)}} for value in (0.0, 1.0)]

    assert list(differences(one, other)) == []
    assert len(list(differences(one, other, times=True))) == 3
    assert [each.path for each in differences(*weights)] == ["model/seconds"]


def test_what_a_plugin_keeps_of_this_run_counts_only_where_it_is_asked_for():
    """Ids and wall times differ by nature; a key of that name anywhere else doesn't stand for them."""
    runs = [{"of_this_run": {"id": one, "times": [one]}, "step": 3} for one in ("x", "y")]
    one, other = (
        {"plugins": {"a": {"state": run}}, "rank1": {"plugins": {"b": {"state": run}}}}
        for run in runs
    )
    elsewhere = [{"model": run, "training": {"plugins": {"a": {"state": run}}}} for run in runs]

    told = list(differences(one, other, times=True))

    assert list(differences(one, other)) == []
    assert {each.of_one_run for each in told} == {
        "plugins/a/state/of_this_run",
        "rank1/plugins/b/state/of_this_run",
    }
    assert len(list(differences(*elsewhere))) == 4
