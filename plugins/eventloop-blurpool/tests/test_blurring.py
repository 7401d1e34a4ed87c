"""The maths alone."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import max_pool2d

from eventloop_blurpool import BlurConv2d, BlurMaxPool2d, anti_aliased, blur, blur_filter


def images(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def blurred_by_hand(image_HW, size, stride):
    """Section 3.2 in float64, pixel by pixel; a pixel beyond the border is the nearest one."""
    height, width = image_HW.shape
    weights = [math.comb(size - 1, i) / 2 ** (size - 1) for i in range(size)]
    before = (size - 1) // 2
    result = torch.zeros(math.ceil(height / stride), math.ceil(width / stride)).double()
    for row, column in itertools.product(*map(range, result.shape)):
        for i, j in itertools.product(range(size), repeat=2):
            y = min(max(row * stride + i - before, 0), height - 1)
            x = min(max(column * stride + j - before, 0), width - 1)
            result[row, column] += weights[i] * weights[j] * image_HW[y, x].double()
    return result


@pytest.mark.parametrize("size", [2, 3, 5, 7])
@pytest.mark.parametrize("stride", [2, 3])
def test_blurring_is_the_formula_of_the_paper(size, stride):
    """A binomial filter, then every second pixel."""
    x = images(2, 3, 7, 6)
    expected = torch.stack(
        [blurred_by_hand(one, size, stride) for one in x.flatten(0, 1)]
    ).unflatten(0, (2, 3))

    actual = blur(x, blur_filter(size), (stride, stride))

    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-6)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(x[..., ::stride, ::stride].double(), expected)


@pytest.mark.parametrize("size", range(2, 8))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_filter_is_exact_in_half_precision(size, dtype):
    """And sums to one, so that a plain surface stays as it is."""
    exact = blur_filter(size)

    assert exact.sum() == 1
    assert torch.equal(exact.to(dtype).float(), exact)


POOLS = [
    {"kernel_size": 2}, {"kernel_size": 3, "stride": 2, "padding": 1}, {"kernel_size": 3},
    {"kernel_size": 2, "stride": 2, "dilation": 2}, {"kernel_size": 1, "stride": 2},
    {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0)},
    {"kernel_size": 3, "stride": 2, "ceil_mode": True},
    {"kernel_size": 2, "stride": 3, "padding": 1, "ceil_mode": True},
]  # fmt: skip


@pytest.mark.parametrize("given", POOLS, ids=str)
@pytest.mark.parametrize("size", [(7, 9), (8, 6), (5, 10)])
def test_a_pool_is_maxima_then_a_blur_and_gives_the_same_shape(given, size):
    """MaxPool with stride s becomes MaxPool with stride 1, blur, stride s."""
    pool = nn.MaxPool2d(**given)
    x = images(2, 3, *size)
    plain = pool(x)

    actual = BlurMaxPool2d.of(pool, 3)(x)

    assert actual.shape == plain.shape
    if not pool.ceil_mode:
        maxima = max_pool2d(x, pool.kernel_size, 1, pool.padding, pool.dilation)
        stride = pool.stride if isinstance(pool.stride, tuple) else (pool.stride,) * 2
        torch.testing.assert_close(actual, blur(maxima, blur_filter(3, stride), stride))
    assert actual.isfinite().all()
    assert not torch.allclose(actual, plain)


CONVS = [
    {"kernel_size": 3, "padding": 1}, {"kernel_size": 1}, {"kernel_size": 3, "groups": 4},
    {"kernel_size": 3, "dilation": 2, "padding": 2, "bias": False},
    {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
    {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    {"kernel_size": 3, "padding": "valid"},
]  # fmt: skip


@pytest.mark.parametrize("given", CONVS, ids=str)
def test_a_convolution_sees_its_input_blurred(given):
    """Whatever its groups, dilation and border are; shapes stay."""
    conv = nn.Conv2d(4, 8, stride=2, **given)
    x = images(2, 4, 9, 8)
    mode = {"circular": "circular", "reflect": "reflect"}.get(conv.padding_mode, "replicate")

    actual = BlurConv2d.of(conv)(x)

    torch.testing.assert_close(actual, conv(blur(x, blur_filter(3), padding=mode)))
    assert actual.shape == conv(x).shape
    assert not torch.allclose(actual, conv(x))


def test_blurring_first_is_the_convolution_without_stride_blurred():
    """Both are convolutions, of which the order doesn't matter, but for the border."""
    conv = nn.Conv2d(4, 8, 3, stride=2, padding=1)
    dense = nn.Conv2d(4, 8, 3, padding=1)
    dense.load_state_dict(conv.state_dict())
    x = images(2, 4, 12, 12)

    first, after = BlurConv2d.of(conv)(x), blur(dense(x), blur_filter(3), (2, 2))

    inside = slice(1, -1)
    torch.testing.assert_close(first[..., inside, inside], after[..., inside, inside])


def moved(layer, x):
    """How much of what a layer gives changes when the image moves by a pixel."""
    there, here = layer(x.roll(1, -1)), layer(x)
    return ((there - here).abs().mean() / here.std()).item()


def test_what_is_blurred_depends_less_on_where_things_stand():
    """What the paper is about; the wider the filter, the less."""
    pool, x = nn.MaxPool2d(2), images(8, 4, 32, 32)

    plain, three, five, seven = (
        moved(pool, x),
        *(moved(BlurMaxPool2d.of(pool, n), x) for n in (3, 5, 7)),
    )

    assert plain > 1.1 * three > 1.2 * five > 1.2 * seven


def test_layers_that_leave_no_pixels_out_or_tell_where_they_were_stay():
    """Indices of maxima that were blurred would point nowhere."""
    layers = {
        "image": nn.Conv2d(3, 16, 3, stride=2), "dense": nn.Conv2d(16, 16, 3),
        "indices": nn.MaxPool2d(2, return_indices=True), "pool": nn.MaxPool2d(3, 1),
        "up": nn.ConvTranspose2d(16, 16, 2, stride=2), "average": nn.AvgPool2d(2),
    }  # fmt: skip
    model = nn.ModuleDict(layers)

    _, replaced = anti_aliased(model)

    assert replaced == {}
    assert dict(model.items()) == layers


def test_a_model_is_anti_aliased_once():
    """A second time finds nothing, so that a script and the plugin may both do it."""
    model = nn.Sequential(nn.Conv2d(16, 16, 3, stride=2), nn.MaxPool2d(2))
    names = list(model.state_dict())

    first, second = anti_aliased(model).replaced, anti_aliased(model).replaced

    assert list(first) == ["0", "1"]
    assert second == {}
    assert list(model.state_dict()) == names
    assert isinstance(model[0], nn.Conv2d)


def test_a_pool_of_whole_numbers_is_the_pool():
    """A filter of whole numbers would be nothing but zeros."""
    mask = torch.arange(50).reshape(1, 2, 5, 5)

    assert torch.equal(BlurMaxPool2d.of(nn.MaxPool2d(2))(mask), max_pool2d(mask, 2))


def test_an_image_without_a_batch_and_one_pixel_will_do():
    """As torch's own layers take them."""
    pool = BlurMaxPool2d.of(nn.MaxPool2d(2), 7)

    assert pool(images(3, 2, 2)).shape == (3, 1, 1)
