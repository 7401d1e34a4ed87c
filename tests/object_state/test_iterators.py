"""Iterators whose position can be read continue there."""

from __future__ import annotations

import itertools


def test_iterators_with_a_position_go_on(restored):
    """Of built-in sequences, and those of itertools whose position can be read."""
    numbers = [3, 4, 5]
    iterators = [iter(numbers), iter(range(9)), itertools.count(2, 3), itertools.cycle("ab")]
    for iterator in iterators:
        next(iterator)

    results = restored(iterators)

    assert [[next(each), next(each)] for each in results] == [
        [next(each), next(each)] for each in iterators
    ]
