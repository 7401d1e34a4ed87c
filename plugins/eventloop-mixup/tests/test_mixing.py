"""The maths alone."""

import statistics

import pytest
import torch

from eventloop_mixup import draw_lam, mix


@pytest.mark.parametrize("lam", [0.0, 0.25, 0.9, 1.0])
def test_a_mix_is_the_formula_of_the_paper(lam):
    """Written out in float64 sample by sample, equation 1 gives the same numbers."""
    inputs = torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(0))
    permutation = torch.tensor([3, 1, 0, 4, 2])
    expected = [
        lam * inputs[i].double() + (1 - lam) * inputs[j].double()
        for i, j in enumerate(permutation.tolist())
    ]

    mixed = mix(inputs, permutation, lam)

    torch.testing.assert_close(mixed.double(), torch.stack(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_mix_keeps_the_dtype_and_with_a_share_of_one_the_bits(dtype):
    """Half-precision data must not grow, and lam = 1 must be training without mixup."""
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).to(dtype)

    mixed = mix(inputs, torch.tensor([5, 4, 3, 2, 1, 0]), 1.0)

    assert mixed.dtype == dtype
    assert torch.equal(mixed, inputs)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_shares_are_drawn_from_the_beta_distribution(alpha):
    """Beta(alpha, alpha) has mean 1/2 and variance 1 / (8 alpha + 4)."""
    shares = [draw_lam(alpha, seed=1, batch=batch) for batch in range(20_000)]

    assert all(0 <= share <= 1 for share in shares)
    assert statistics.fmean(shares) == pytest.approx(0.5, abs=0.01)
    assert statistics.pvariance(shares) == pytest.approx(1 / (8 * alpha + 4), rel=0.05)


def test_a_share_is_a_function_of_seed_and_batch():
    """A resumed run must draw for a batch what an unbroken one drew."""
    draws = {(seed, batch): draw_lam(0.2, seed, batch) for seed in (1, 2) for batch in (0, 1)}

    assert all(draw_lam(0.2, *key) == share for key, share in draws.items())
    assert len(set(draws.values())) == 4
