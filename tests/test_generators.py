"""Where random generators stand, kept and put back."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from eventloop.rng import (
    get_rng_state,
    global_generators,
    is_generator,
    plain,
    set_rng_state,
    unplain,
)

KINDS = {
    "python": (random.Random(1), lambda one: one.gauss(0, 1)),
    "torch": (torch.Generator().manual_seed(1), lambda one: torch.randn(3, generator=one).tolist()),
    "numpy": (np.random.default_rng(1), lambda one: one.normal(size=3).tolist()),
    "mt19937": (np.random.Generator(np.random.MT19937(1)), lambda one: one.random(3).tolist()),
    "philox": (np.random.Generator(np.random.Philox(1)), lambda one: one.random(3).tolist()),
    "legacy": (np.random.RandomState(1), lambda one: one.randn()),
    "global python": (global_generators()["python"], lambda one: one.gauss(0, 1)),
    "global torch": (global_generators()["torch"], lambda one: torch.rand(3).tolist()),
    "global numpy": (global_generators()["numpy"], lambda one: one.randn()),
}


@pytest.mark.parametrize(("generator", "draw"), KINDS.values(), ids=KINDS)
def test_a_generator_goes_on_from_where_it_stood(generator, draw):
    """Also in the middle of a pair of normal numbers."""
    draw(generator)
    standing = get_rng_state(generator)
    expected = [draw(generator) for _ in range(3)]

    set_rng_state(generator, standing)

    assert [draw(generator) for _ in range(3)] == expected


@pytest.mark.parametrize("name", KINDS)
def test_generators_are_told_from_other_values(name):
    """Modules, which stand for the global ones, aren't found among attributes."""
    is_module = name in ("global python", "global numpy")

    assert is_generator(KINDS[name][0]) is not is_module
    assert not is_generator(3)


@pytest.mark.parametrize("array", [np.arange(6).reshape(2, 3), np.array([], "uint32"), np.eye(2)])
def test_arrays_become_tensors_and_back(array):
    """A checkpoint holds tensors and plain values alone."""
    found = unplain(plain({"a": array, "b": np.float64(0.5), "c": None}))

    np.testing.assert_array_equal(found["a"], array)
    assert found["a"].dtype == array.dtype
    assert (found["b"], found["c"]) == (0.5, None)
