"""The maths alone."""

import math

import pytest
import torch

from eventloop_ema import half_life_of, move, share_of


@pytest.mark.parametrize("half_life", [0.5, 3, 1000, 1e9])
def test_old_weights_count_for_half_after_a_half_life(half_life):
    """That is what the name says, however the time is cut into steps."""
    left = math.prod(1 - share_of(half_life, half_life / 8) for _ in range(8))

    assert left == pytest.approx(0.5)
    assert share_of(half_life, half_life) == pytest.approx(0.5)


@pytest.mark.parametrize("decay", [0.5, 0.99, 0.9999])
def test_a_decay_is_a_half_life(decay):
    """Two ways to say one thing."""
    assert 1 - share_of(half_life_of(decay), 1) == pytest.approx(decay, rel=1e-12)


def test_a_long_half_life_keeps_its_digits():
    """1 - 2 ** -x would be 0 where x is small, and the average would stand still."""
    assert share_of(1e17, 1) == pytest.approx(math.log(2) * 1e-17)


@pytest.mark.parametrize("share", [0.01, 0.7, torch.tensor(0.25)])
def test_a_move_is_the_formula_of_the_paper(share):
    """Written out in float64: decay * average + (1 - decay) * value."""
    generator = torch.Generator().manual_seed(0)
    averages = [torch.randn(shape, generator=generator) for shape in [(3,), (2, 2), ()]]
    values = [torch.randn(one.shape, generator=generator) for one in averages]
    decay = 1 - float(share)
    expected = [
        decay * old.double() + (1 - decay) * new.double()
        for old, new in zip(averages, values, strict=True)
    ]

    move(averages, values, share)

    for actual, wanted in zip(averages, expected, strict=True):
        torch.testing.assert_close(actual.double(), wanted, rtol=0, atol=1e-6)


def test_a_share_of_nothing_changes_no_bit():
    """A step that the device has skipped under fp16 isn't one."""
    averages = [torch.randn(5, generator=torch.Generator().manual_seed(0))]
    before = averages[0].clone()

    move(averages, [torch.full((5,), 1e30)], torch.tensor(0.0))

    assert torch.equal(averages[0], before)


def test_values_of_other_precisions_are_taken():
    """Weights in bfloat16 are averaged in float32, complex ones as they are."""
    averages = [torch.zeros(2), torch.zeros(2, dtype=torch.complex64)]

    move(averages, [torch.ones(2).bfloat16(), torch.ones(2) * 2j], 0.001)

    torch.testing.assert_close(averages[0], torch.full((2,), 0.001))
    torch.testing.assert_close(averages[1], torch.full((2,), 0.002j, dtype=torch.complex64))
