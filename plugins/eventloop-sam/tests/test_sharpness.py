"""The maths alone."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from eventloop_sam import ascent, restored
from eventloop_testing import run_ranks


def params_with_gradients(dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    params = []
    for shape, by in (((3, 2), scale), ((4,), 1 / scale), ((), 1.0)):
        values, gradients = torch.randn((2, *shape), generator=generator, dtype=torch.float64)
        params.append(nn.Parameter((values * by).to(dtype)))
        params[-1].grad = (gradients / by).to(dtype)
    return params


def by_the_paper(params, rho, adaptive):
    """Equation 2 of the SAM paper and equation 8 of ASAM, over one long vector in float64."""
    w = torch.cat([param.detach().double().flatten() for param in params])
    g = torch.cat([param.grad.double().flatten() for param in params])
    t = w.abs() if adaptive else torch.ones_like(w)
    return rho * t**2 * g / (t * g).square().sum().sqrt()


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 1e-3)])
def test_the_way_up_is_the_formula_of_the_paper(adaptive, dtype, tolerance):
    """One norm over all parameters, whatever their shapes."""
    params = params_with_gradients(dtype)
    expected = by_the_paper(params, 0.1, adaptive)

    steps = ascent(params, 0.1, adaptive=adaptive)

    assert [step.dtype for step in steps] == [dtype] * 3
    torch.testing.assert_close(flat(steps).double(), expected, rtol=0, atol=tolerance)
    other = by_the_paper(params, 0.1, not adaptive)
    assert not torch.allclose(flat(steps).double(), other, atol=tolerance)


def test_a_rescaled_model_is_perturbed_alike_where_it_is_adaptive():
    """A layer scaled up and the next one down is the same function, and equally sharp."""
    one, other = params_with_gradients(), params_with_gradients(scale=8.0)

    relative = flat(ascent(one, 0.1, adaptive=True)) / flat(one)

    torch.testing.assert_close(flat(ascent(other, 0.1, adaptive=True)) / flat(other), relative)
    plain = flat(ascent(one, 0.1)) / flat(one)
    assert not torch.allclose(flat(ascent(other, 0.1)) / flat(other), plain)


@pytest.mark.parametrize("adaptive", [False, True])
def test_without_a_gradient_there_is_no_way_up(adaptive):
    """0 / 0 would make every weight NaN."""
    params = params_with_gradients()
    for param in params:
        param.grad.zero_()

    assert not flat(ascent(params, 0.1, adaptive=adaptive)).any()


def test_tensors_come_back_bit_for_bit_also_after_an_exception():
    """To subtract what was added would leave roundings, and NaN where it was infinite."""
    params = [*params_with_gradients(torch.float32), torch.tensor(7)]
    before = [param.detach().clone() for param in params]

    with pytest.raises(ArithmeticError), restored(params):
        for param in params:
            param.detach().mul_(0 if param.dtype == torch.int64 else float("nan"))
        raise ArithmeticError

    assert all(map(torch.equal, params, before))


def on_a_mesh(adaptive):
    """Goes up from parameters that are sharded over two dimensions, over one, and not at all."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    params, kinds = [], [(mesh, [Shard(0), Shard(1)]), (mesh["tp"], [Shard(0)]), None]
    for param, kind in zip(params_with_gradients(), kinds, strict=True):
        values = [param.detach(), param.grad]
        values = values if kind is None else [distribute_tensor(one, *kind) for one in values]
        params.append(nn.Parameter(values[0]))
        params[-1].grad = values[1]
    return [
        DTensor.from_local(step, *kind, shape=like.shape, stride=like.stride()).full_tensor()
        if kind
        else step
        for step, kind, like in zip(
            ascent(params, 0.1, adaptive=adaptive), kinds, params, strict=True
        )
    ]


@pytest.mark.parametrize("adaptive", [False, True])
def test_the_way_up_from_shards_is_that_of_one_process(adaptive):
    """The norm is that of all entries, whichever rank holds them."""
    expected = ascent(params_with_gradients(), 0.1, adaptive=adaptive)

    for steps in run_ranks(on_a_mesh, adaptive, world_size=4):
        for step, one in zip(steps, expected, strict=True):
            torch.testing.assert_close(step, one)
