"""Fingerprints differ if a value or contents have changed, and only then."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from eventloop.object_state.fingerprints import fingerprint, fingerprint_of_contents


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (1, True),
        (0.0, -0.0),
        (1, 1.0),
        ((1, [2]), (1, [2])),
        (np.float32(1), np.float64(1)),
        ([], []),
    ],
)
def test_values_of_other_types_and_other_objects_differ(value, other):
    """An equal value isn't the same value."""
    assert fingerprint(value) != fingerprint(other)


@pytest.mark.parametrize("value", [float("nan"), (1, "a", None), np.int16(3), b"a", [1]])
def test_a_value_is_equal_to_itself(value):
    """Also a NaN."""
    assert fingerprint(value) == fingerprint(value)


def test_an_iterator_differs_when_it_has_moved():
    """It is the same object at another position."""
    numbers = itertools.count()
    before = fingerprint(numbers)
    next(numbers)

    assert fingerprint(numbers) != before


CHANGES = {
    "an entry of a list": ([1, 2], lambda values: values.append(3)),
    "a key of a dict": ({"a": 1}, lambda values: values.update(b=2)),
    "an entry of a set": ({1}, lambda values: values.add(2)),
    "an entry of an array": (np.zeros(3), lambda values: values.__setitem__(1, 5)),
    "an entry of a large tensor": (torch.zeros(100_000), lambda values: values[7].add_(1)),
    "an assignment to data": (
        torch.zeros(3),
        lambda values: setattr(values, "data", torch.ones(3)),
    ),
    "a byte": (bytearray(3), lambda values: values.__setitem__(0, 1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_contents_differ(name):
    """Of the same object."""
    value, change = CHANGES[name]
    before = fingerprint_of_contents(value)
    assert before == fingerprint_of_contents(value)

    change(value)

    assert fingerprint_of_contents(value) != before


def test_a_generator_that_has_drawn_is_the_same_value():
    """Its state is saved by itself, or as that of the process."""
    generator = random.Random(1)
    before = fingerprint(generator)

    generator.gauss(0, 1)

    assert fingerprint(generator) == before
