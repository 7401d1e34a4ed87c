"""A digest is that of the weights, wherever they are, and of no others."""

from __future__ import annotations

import pytest
import torch

from eventloop.training.tensor_slices import TensorSlice
from eventloop.training.weight_digest import digest_of

BASE = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))


def alone(value):
    return [value]


def of(**weights):
    return digest_of(weights, alone)


def of_ranks(*ranks):
    """Returns what the first of several ranks finds, each with weights of its own."""
    sums = []
    for weights in ranks:
        digest_of(weights, lambda one: sums.append(one) or [one])
    return digest_of(ranks[0], lambda one: sums)


OTHERS = {
    "negated": -BASE,
    "twice as large": BASE * 2,
    "rows exchanged": BASE.roll(1, 0),
    "transposed": BASE.T.contiguous().view(128, 64),
    "one bit": torch.where(torch.arange(64) == 3, BASE.nextafter(BASE + 1), BASE),
    "another type": BASE.bfloat16(),
    "another shape": BASE.reshape(64, 128),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_weights_have_another_digest(kind):
    """Scaled and reordered ones, too, of which plain sums might be the same."""
    assert of(weight=OTHERS[kind]) != of(weight=BASE)


def test_constant_weights_are_told_apart():
    """A norm's scale begins as ones, and may be anything else."""
    digests = {of(scale=torch.full((2**17,), value)) for value in (0.0, 1.0, -1.0, 2.0)}

    assert len(digests) == 4
    assert of(other=BASE) != of(weight=BASE)


def test_the_layout_in_memory_does_not_matter():
    """Convolutions may be channels_last on one machine."""
    image = BASE.view(8, 4, 16, 16)

    assert of(weight=image.to(memory_format=torch.channels_last)) == of(weight=image)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.complex64])
def test_any_type_has_a_digest(dtype):
    """Buffers are of all types; scalars and empty tensors have one, too."""
    value = BASE.to(dtype)

    assert of(a=value, b=value[0, 0], c=value[:0], d=3) == of(
        a=value.clone(), b=value[0, 0], c=value[:0], d="not a tensor"
    )
    assert of(a=value) != of(a=value.logical_not() if dtype is torch.bool else value + 1)


@pytest.mark.parametrize("dim", [0, 1])
def test_slices_have_the_digest_of_the_whole(dim):
    """A run may go on with another number of ranks, or with one process."""
    parts = BASE.split([40, 24] if dim else [100, 28], dim)
    offsets = [(0, 0), (0, 40) if dim else (100, 0)]
    slices = [
        {"w": TensorSlice(part, (128, 64), at)} for part, at in zip(parts, offsets, strict=True)
    ]
    copy = {"w": TensorSlice(parts[1], (128, 64), offsets[1], is_copy=True)}

    assert of_ranks(*slices) == of_ranks(*slices, copy) == of(w=BASE)
    assert of_ranks(slices[0], slices[0]) != of(w=BASE)
    assert of_ranks({"b": BASE}, {"b": BASE + 1}) == of(b=BASE)
