"""Histograms alone."""

import math

import numpy as np
import pytest
import torch

from eventloop_tensorboard import histogram, measure
from eventloop_tensorboard.histograms import BOUNDS


def made(tensor):
    counts, stats = (one.tolist()[0] for one in measure([tensor]))
    found = histogram("x", counts, stats)
    return found if found is None else found.value[0].histo


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_entries_are_counted_as_numpy_counts_them(dtype):
    """With the same bounds; empty buckets are left out, but for one before each that isn't."""
    tensor = torch.randn(40, 25, generator=torch.Generator().manual_seed(0)).to(dtype)
    entries = tensor.float().numpy().ravel()
    expected, _ = np.histogram(entries, np.array(BOUNDS, dtype=np.float32))

    found = made(tensor)

    assert [count for count in found.bucket if count] == [count for count in expected if count]
    assert dict(zip(found.bucket_limit, found.bucket, strict=True)).items() >= {
        (BOUNDS[idx + 1], count) for idx, count in enumerate(expected) if count
    }
    assert (found.num, found.min, found.max) == (1000, entries.min(), entries.max())
    assert found.sum == pytest.approx(entries.sum(), rel=1e-4)
    assert found.sum_squares == pytest.approx(np.square(entries).sum(), rel=1e-4)


def test_every_bucket_begins_where_the_one_before_ends():
    """TensorBoard takes the bound before for the left edge."""
    found = made(torch.tensor([-3.0, 0.0, 1e-9, 2.0, 2.01]))

    for idx, (bound, count) in enumerate(zip(found.bucket_limit, found.bucket, strict=True)):
        if count and idx:
            assert found.bucket_limit[idx - 1] == BOUNDS[BOUNDS.index(bound) - 1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_left_out(value):
    """It lies in no bucket, and would make the sums of the others worthless."""
    found = made(torch.tensor([1.0, value, -2.0]))

    assert (found.num, found.min, found.max, found.sum, found.sum_squares) == (2, -2, 1, -1, 5)
    assert made(torch.tensor([value])) is None


def test_nothing_is_written_or_remembered():
    """A gradient is somebody else's."""
    tensor = torch.randn(5, requires_grad=True)

    counts, stats = measure([tensor])

    assert tensor._version == 0
    assert not counts.requires_grad
    assert not stats.requires_grad
