"""The maths alone."""

import statistics

import pytest
import torch

from eventloop_cutmix import Box, cut_and_paste, draw_box

PERMUTATION = torch.tensor([3, 1, 0, 2])


def images(dtype=torch.float32):
    return torch.randint(256, (4, 2, 5, 7), generator=torch.Generator().manual_seed(0)).to(dtype)


BOXES = [Box(1, 4, 2, 7), Box(0, 5, 0, 7), Box(0, 1, 6, 7), Box(2, 2, 0, 7)]


@pytest.mark.parametrize("box", BOXES)
def test_a_cut_is_the_formula_of_the_paper(box):
    """Equation 1 with a mask written out: x = M * x_A + (1 - M) * x_B, and lam the mean of M."""
    mask = torch.ones(5, 7, dtype=torch.float64)
    for row in range(box.top, box.bottom):
        for column in range(box.left, box.right):
            mask[row, column] = 0
    given = images().double()
    expected = torch.stack(
        [mask * given[i] + (1 - mask) * given[j] for i, j in enumerate(PERMUTATION.tolist())]
    )

    mixed = cut_and_paste(images(), PERMUTATION, box)

    assert torch.equal(mixed.double(), expected)
    assert box.share_outside(5, 7) == pytest.approx(mask.mean().item())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
def test_images_stay_what_they_are(dtype):
    """Bytes needn't become floats, and the loader's batch isn't written into."""
    given = images(dtype).contiguous(memory_format=torch.channels_last)
    before = given.clone()

    mixed = cut_and_paste(given, PERMUTATION, BOXES[0])

    assert mixed.dtype == dtype
    assert mixed.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(given, before)
    assert not torch.equal(mixed, before)


def test_rectangles_lie_within_the_image():
    """A centre near the border leaves a part of the rectangle outside, which is cut off."""
    for batch in range(2_000):
        box = draw_box(1.0, 1, batch, 8, 5)

        assert 0 <= box.top <= box.bottom <= 8
        assert 0 <= box.left <= box.right <= 5
        assert 0 <= box.share_outside(8, 5) <= 1


def test_rectangles_are_as_large_as_the_paper_draws_them():
    """A uniform area u cut off around a uniform centre has mean E[(r - r^2 / 4)^2], r = sqrt(u).

    That is 1/2 - 1/5 + 1/48.
    """
    boxes = [draw_box(1.0, 1, batch, 1_000, 1_000) for batch in range(20_000)]

    areas = [1 - box.share_outside(1_000, 1_000) for box in boxes]

    assert statistics.fmean(areas) == pytest.approx(1 / 2 - 1 / 5 + 1 / 48, abs=0.008)
    assert statistics.fmean(areas) != pytest.approx(1 / 2, abs=0.1)  # not cut off


def test_a_small_alpha_leaves_many_images_as_good_as_whole():
    """As of any Beta distribution with mass at its ends; mixup's default would waste batches."""

    def whole_frac(alpha):
        boxes = [draw_box(alpha, 1, batch, 100, 100) for batch in range(2_000)]
        return sum(box.share_outside(100, 100) > 0.98 for box in boxes) / len(boxes)

    assert whole_frac(0.1) > 0.35
    assert whole_frac(1.0) < 0.05


def test_a_rectangle_is_a_function_of_seed_and_batch():
    """A resumed run must draw for a batch what an unbroken one drew."""
    draws = {
        (seed, batch): draw_box(1.0, seed, batch, 99, 99) for seed in (1, 2) for batch in (0, 1)
    }

    assert all(draw_box(1.0, *key, 99, 99) == box for key, box in draws.items())
    assert len(set(draws.values())) == 4
