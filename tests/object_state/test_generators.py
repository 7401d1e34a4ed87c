"""Random generators continue where they were."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from eventloop.object_state.generators import encode_generator, new_generator
from eventloop_testing import pretend_device, run_ranks


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


def test_a_generator_of_a_device_is_made_there():
    """A device isn't named in a checkpoint: it is that of the resumed run."""

    def draws():
        with pretend_device() as device:
            generator = torch.Generator(device).manual_seed(3)
            nest = encode_generator(generator)
            new = new_generator(nest, device)
            drawn = [torch.rand((), generator=each, device=device) for each in (generator, new)]
            return new.device.type, [number.item() for number in drawn]

    ((device, (number, again)),) = run_ranks(draws, world_size=1)
    assert device == "pretend"
    assert number == again
