"""Where random generators stand, kept and put back."""

from __future__ import annotations

import importlib
import pickle
import random
import sys

import numpy as np
import pytest
import torch

from eventloop.rng import (
    arrays_to_tensors,
    get_rng_state,
    global_generators,
    global_rng_states,
    host_generators,
    is_generator,
    set_global_rng_states,
    set_rng_state,
    tensors_to_arrays,
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
    found = tensors_to_arrays(arrays_to_tensors({"a": array, "b": np.float64(0.5), "c": None}))

    np.testing.assert_array_equal(found["a"], array)
    assert found["a"].dtype == array.dtype
    assert (found["b"], found["c"]) == (0.5, None)


MOVES = {
    "python": (random.random, lambda: random.gauss(0, 1), lambda: random.getrandbits(624 * 32)),
    "numpy": (np.random.rand, np.random.normal, lambda: np.random.bytes(624 * 4)),
    "torch": (
        lambda: torch.rand(()),
        lambda: torch.randn(()),
        lambda: torch.empty(624, dtype=torch.int32).random_(),
    ),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_fingerprint_differs_where_the_state_does_and_nowhere_else(name):
    """Also after as many draws as it has words, where its position is the same, and after seeds."""
    own, chance = host_generators()[name], random.Random(3)
    states, found = [own.get_state()], {}
    seeds = [lambda: own.seed(3), lambda: own.seed(2**32 + 3), lambda: own.seed(0)]
    moves = [*MOVES[name] * 5, *seeds, lambda: own.set_state(chance.choice(states))]
    for _ in range(400):
        chance.choice(moves)()
        states.append(own.get_state())
        state = states[-1].numpy().tobytes() if name == "torch" else repr(states[-1])
        found.setdefault(state, set()).add(own.fingerprint())

    assert len(found) > 100
    assert {len(fingerprints) for fingerprints in found.values()} == {1}
    assert len(set.union(*found.values())) == len(found)


@pytest.mark.parametrize("name", MOVES)
def test_a_fingerprint_is_a_few_bytes(name):
    """They are read before and after each batch; all of the state takes many times as long."""
    assert len(pickle.dumps(host_generators()[name].fingerprint())) < 200


def test_a_fingerprint_is_that_of_the_bit_generator_numpy_has_now():
    before, own = np.random.get_bit_generator(), host_generators()["numpy"]
    first = own.fingerprint()
    np.random.set_bit_generator(np.random.MT19937(5))
    try:
        second = own.fingerprint()
        np.random.rand()
        assert len({first, second, own.fingerprint()}) == 3
    finally:
        np.random.set_bit_generator(before)
    assert own.fingerprint() == first


def test_a_state_of_numpy_imports_it(monkeypatch):
    """A resumed run may not have imported it yet; its draws would be others."""
    state = global_rng_states()["numpy"]
    expected = np.random.rand()
    monkeypatch.delitem(sys.modules, "numpy")
    monkeypatch.setattr(importlib, "import_module", lambda name: sys.modules.setdefault(name, np))

    set_global_rng_states({"numpy": state})

    assert np.random.rand() == expected
