"""The maths alone."""

import pytest
import torch

from eventloop_progressive_resizing import crop, random_corner, resize, resize_mask, size_at


def weights_by_hand(full, now):
    """What each new pixel takes of each old one: a triangle over the pixels that it covers."""
    scale = full / now
    middles = (torch.arange(now).double() + 0.5) * scale
    distances = (torch.arange(full).double() + 0.5 - middles[:, None]).abs() / scale
    triangle = (1 - distances).clamp(min=0)
    return triangle / triangle.sum(1, keepdim=True)


@pytest.mark.parametrize(("full", "now"), [((8, 8), (4, 4)), ((9, 12), (8, 4)), ((7, 5), (6, 5))])
def test_resizing_is_a_mean_over_the_pixels_that_are_covered(full, now):
    """Bilinear with a filter as wide as the step, in float64, a matrix for each dimension."""
    images = torch.rand(2, 3, *full, generator=torch.Generator().manual_seed(0))
    rows, columns = (weights_by_hand(*pair) for pair in zip(full, now, strict=True))
    expected = rows @ images.double() @ columns.T

    small = resize(images, now)

    torch.testing.assert_close(small.double(), expected, rtol=0, atol=1e-6)
    other = images[..., : now[0], : now[1]].double()
    assert not torch.allclose(other, expected, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_resizing_keeps_the_dtype(dtype):
    """Half precision, too, for which torch has no kernel on the host."""
    small = resize(torch.full((1, 1, 8, 8), 0.5, dtype=dtype), (4, 4))

    assert small.dtype == dtype
    assert torch.equal(small, torch.full((1, 1, 4, 4), 0.5, dtype=dtype))


@pytest.mark.parametrize(("full", "now"), [(8, 4), (8, 6), (7, 3), (5, 5), (9, 1)])
def test_a_mask_takes_the_pixel_in_the_middle(full, now):
    """The formula of nearest-exact: floor((i + 1/2) * full / now), for classes as for numbers."""
    mask = torch.arange(full * full).reshape(1, full, full)
    expected = torch.nn.functional.interpolate(
        mask[None].double(), (now, now), mode="nearest-exact"
    )

    small = resize_mask(mask, (now, now))

    assert small.dtype == torch.int64
    assert torch.equal(small.double(), expected[0])


def test_classes_are_never_mixed():
    """The mean of dog and cat is not an animal."""
    mask = torch.randint(2, (3, 8, 8), generator=torch.Generator().manual_seed(0)) * 7

    assert set(resize_mask(mask, (5, 6)).unique().tolist()) == {0, 7}


@pytest.mark.parametrize(
    ("full", "scale", "increment", "size"),
    [
        (224, 0.5, 4, 112), (224, 0.51, 4, 112), (224, 0.5, 32, 96), (224, 0.999, 32, 192),
        (28, 0.5, 8, 8), (28, 0.999, 8, 24), (28, 1.0, 8, 28), (8, 0.01, 4, 4), (3, 0.5, 4, 3),
    ],
)  # fmt: skip
def test_sizes_are_multiples_but_for_the_whole(full, scale, increment, size):
    """Rounded down, at least one increment, at most the image."""
    assert size_at(full, scale, increment) == size


def test_windows_lie_inside_everywhere():
    """Drawn uniformly, and again the same for the same batch."""
    drawn = [random_corner((8, 6), (4, 6), seed=1, batch=batch) for batch in range(200)]

    assert {top for top, _ in drawn} == {0, 1, 2, 3, 4}
    assert {left for _, left in drawn} == {0}
    assert drawn == [random_corner((8, 6), (4, 6), seed=1, batch=batch) for batch in range(200)]
    assert drawn != [random_corner((8, 6), (4, 6), seed=2, batch=batch) for batch in range(200)]


def test_image_and_mask_are_cut_alike():
    """A mask that is shifted would teach shifted things."""
    image = torch.arange(48).reshape(1, 1, 8, 6)

    assert torch.equal(crop(image, (4, 3), (2, 1))[0], crop(image[0], (4, 3), (2, 1)))
    assert crop(image, (4, 3), (2, 1))[0, 0, 0, 0] == 13
