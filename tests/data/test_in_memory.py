"""Tensors in memory are read a batch at a time: the same bits, the same draws."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    StackDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from eventloop.data import tensors
from eventloop.data.in_memory import GatheredDataset, collate_gathered, gathering

X = torch.arange(60.0).reshape(12, 5)
Y = torch.arange(12)
PAIRS = TensorDataset(X, Y)

DATASETS = {
    "tensors": PAIRS,
    "one tensor": TensorDataset(X),
    "a bare tensor": X,
    "halves": TensorDataset(X.half(), Y.bool()),
    "a subset": Subset(PAIRS, [11, 3, 3, 0, 5, -1]),
    "a subset of a subset": Subset(Subset(PAIRS, range(1, 11)), [4, 2, 9]),
    "a subset by tensor": Subset(PAIRS, torch.tensor([4, 2, 9])),
    "a concatenation": ConcatDataset([PAIRS, TensorDataset(X + 100, Y), Subset(PAIRS, [2, 1])]),
    "a stack": StackDataset(X, PAIRS),
    "a stack by name": StackDataset(x=X, pair=PAIRS),
    "stacks one after another": ConcatDataset([StackDataset(x=X, y=Y), StackDataset(x=-X, y=Y)]),
}

LOADERS = {
    "in order": {"batch_size": 5},
    "shuffled": {"batch_size": 4, "shuffle": True},
    "the last dropped": {"batch_size": 5, "drop_last": True},
    "workers": {"batch_size": 2, "num_workers": 2},
}


def equal(one, other):
    if isinstance(one, torch.Tensor):
        same = type(one) is type(other) and one.dtype == other.dtype and torch.equal(one, other)
        return same and one.stride() == other.stride()
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return type(one) is type(other) and all(map(equal, one, other))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("dataset", DATASETS.values(), ids=DATASETS)
@pytest.mark.parametrize("given", LOADERS.values(), ids=LOADERS)
def test_a_gather_gives_the_batches_that_reading_sample_by_sample_gives(dataset, given):
    """Values, types, strides, structure, and what is left of the generator."""
    torch.manual_seed(7)
    expected = list(DataLoader(dataset, **given))
    left = torch.rand(1)

    gathered, collate_fn = gathering(dataset, default_collate)
    torch.manual_seed(7)
    actual = list(DataLoader(gathered, collate_fn=collate_fn, **given))

    assert isinstance(gathered, GatheredDataset)
    assert equal(expected, actual)
    assert torch.equal(left, torch.rand(1))


def test_a_sampler_s_indices_may_come_again():
    """Weighted samplers draw with replacement."""
    torch.manual_seed(0)
    sampler = list(WeightedRandomSampler(torch.ones(12), 30))
    gathered, collate_fn = gathering(PAIRS, default_collate)

    expected = list(DataLoader(PAIRS, 4, sampler=sampler))

    assert equal(expected, list(DataLoader(gathered, 4, sampler=sampler, collate_fn=collate_fn)))


class OwnTensors(TensorDataset):
    def __getitem__(self, idx):
        return [one + 1 for one in super().__getitem__(idx)]


LEFT_ALONE = {
    "a user's class": OwnTensors(X),
    "a list": [1, 2, 3],
    "a user's class in a subset": Subset(OwnTensors(X), [1]),
    "a transposed tensor": TensorDataset(
        torch.ones(3, 4, 5, 6).to(memory_format=torch.channels_last)
    ),
    "sparse": TensorDataset(torch.eye(3).to_sparse()),
    "with gradients": TensorDataset(torch.ones(3, requires_grad=True)),
    "parameters": TensorDataset(torch.nn.Parameter(X)),
}


@pytest.mark.parametrize("dataset", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_what_a_gather_may_change_is_read_sample_by_sample(dataset):
    """Only what is known to give the same bits is read in another way."""
    assert gathering(dataset, default_collate) == (dataset, default_collate)


def test_an_own_collate_function_gets_samples():
    """It may do anything with them."""
    assert gathering(PAIRS, list) == (PAIRS, list)


@pytest.mark.parametrize("index", [12, -13, 2**70, 1.5, None])
def test_a_wrong_index_is_the_error_that_torch_raises(index):
    """A sampler's mistake reads as in a plain loop."""
    loader = {"batch_size": 2, "sampler": [0, index]}
    with pytest.raises((LookupError, RuntimeError, TypeError, ValueError)) as expected:
        list(DataLoader(PAIRS, **loader))
    gathered, collate_fn = gathering(PAIRS, default_collate)

    with pytest.raises(type(expected.value)) as actual:
        list(DataLoader(gathered, collate_fn=collate_fn, **loader))

    assert str(actual.value) == str(expected.value)


def test_tensors_that_are_replaced_are_read_as_they_are_then():
    """A data set may be changed between epochs, even to what no gather suits."""
    dataset = TensorDataset(X)
    gathered, _ = gathering(dataset, default_collate)

    gathered.tensors = (X.double() * 2,)

    assert equal([X[[1, 0]].double() * 2], collate_gathered(gathered.__getitems__([1, 0])))
    dataset.tensors = (X.T.contiguous().T,)
    assert torch.equal(X[[1, 0]], collate_gathered(gathered.__getitems__([1, 0]))[0])


def test_it_can_be_sent_to_a_worker():
    """Where processes aren't forks, it is pickled."""
    gathered, collate_fn = pickle.loads(pickle.dumps(gathering(PAIRS, default_collate)))

    assert equal([X[[3, 1]], Y[[3, 1]]], collate_fn(gathered.__getitems__([3, 1])))
    assert len(gathered) == 12
    assert equal(gathered[3], PAIRS[3])


def test_a_loader_over_arrays_is_one_call():
    """Arrays of NumPy, tensors and lists; a mapping for batches that are mappings."""
    (x, y), _ = tensors(X.numpy(), Y.tolist(), batch_size=8)
    named = next(iter(tensors({"x": X, "y": np.arange(12)}, batch_size=8)))

    assert equal([x, y], [X[:8], Y[:8]])
    assert equal(named, {"x": X[:8], "y": Y[:8]})


@pytest.mark.parametrize("arrays", [(), (X, Y[:3]), (1.0,), ({},)])
def test_arrays_that_do_not_match_are_refused(arrays):
    """With the shapes that were given."""
    with pytest.raises(ValueError, match=r"equal numbers of rows, got shapes: (none|\()"):
        tensors(*arrays, batch_size=2)
