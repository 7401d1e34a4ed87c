"""Random generators continue where they were."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch


@pytest.mark.parametrize(
    "make",
    [
        lambda: random.Random(3),
        lambda: np.random.RandomState(3),
        lambda: np.random.default_rng(3),
        lambda: np.random.Generator(np.random.SFC64(3)),
    ],
)
def test_a_generator_goes_on(restored, make):
    """Made anew, where the place held none."""
    generator = make()
    generator.random()

    assert restored(generator).random() == generator.random()


def test_a_generator_of_torch_goes_on(restored):
    """It has other methods."""
    generator = torch.Generator().manual_seed(3)

    assert torch.equal(
        torch.rand(5, generator=restored(generator)), torch.rand(5, generator=generator)
    )
