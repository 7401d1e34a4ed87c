"""The maths alone."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from eventloop_agc import clip_units_, unit_norms
from eventloop_testing import run_ranks

SHAPES = [(3, 4), (2, 3, 3, 3), (5,), (), (4, 1)]


def make_params(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    params = []
    for shape in SHAPES:
        values, gradients = torch.randn((2, *shape), generator=generator, dtype=torch.float64)
        params.append(nn.Parameter(values.to(dtype)))
        params[-1].grad = gradients.to(dtype)
    return params


def by_the_paper(weight, gradient, clip, eps):
    """Equation 3, unit by unit in float64; gives the gradient and how many units it clips."""
    units = list(zip(weight, gradient, strict=True)) if weight.ndim > 1 else [(weight, gradient)]
    clipped, num_clipped = [], 0
    for w, g in units:
        longest = clip * max(w.double().square().sum().sqrt().item(), eps)
        length = g.double().square().sum().sqrt().item()
        clipped.append(g.double() * longest / length if length > longest else g.double())
        num_clipped += length > longest
    return torch.stack(clipped) if weight.ndim > 1 else clipped[0], num_clipped


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("clip", [0.1, 1.0, 100.0])
def test_gradients_are_clipped_as_the_paper_says(dtype, tolerance, clip):
    """Units are rows, filters, and whole vectors, each clipped by itself."""
    params = make_params(dtype)
    expected = [by_the_paper(param.detach(), param.grad, clip, 1e-3) for param in params]

    share = clip_units_(params, clip)

    for param, (gradient, _) in zip(params, expected, strict=True):
        assert param.grad.dtype == dtype
        torch.testing.assert_close(param.grad.double(), gradient, rtol=tolerance, atol=1e-12)
    num_units = sum(len(unit_norms(param)) for param in params)
    assert share.item() == pytest.approx(sum(num for _, num in expected) / num_units)


def test_a_clipped_norm_of_all_is_something_else():
    """Control: the comparison sees that torch's own clipping treats all units alike."""
    params, others = make_params(), make_params()

    clip_units_(params, 1.0)
    torch.nn.utils.clip_grad_norm_(others, 1.0)

    assert not torch.allclose(params[0].grad, others[0].grad)


def test_gradients_that_are_short_keep_their_bits():
    """A clipping that isn't needed must be none."""
    params, others = make_params(torch.float32), make_params(torch.float32)

    share = clip_units_(params, 100.0)

    assert share == 0
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(params, others, strict=True))


def test_weights_and_gradients_of_zero_do_no_harm():
    """A bias starts at 0 and must move; a unit that isn't used has no gradient."""
    weight, unused = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2, 2))
    weight.grad, unused.grad = torch.tensor([3.0, 4.0]), torch.zeros(2, 2)

    share = clip_units_([weight, unused, nn.Parameter(torch.ones(1))], 0.5, eps=0.01)

    torch.testing.assert_close(weight.grad, torch.tensor([0.003, 0.004]))
    assert not unused.grad.any()
    assert share.item() == pytest.approx(1 / 3)


def test_an_overflow_stays_one():
    """Under fp16 it is known already, and the step will be skipped; elsewhere it must be seen."""
    param = nn.Parameter(torch.ones(2, 2))
    param.grad = torch.tensor([[float("inf"), 1.0], [1.0, 1.0]])

    clip_units_([param], 0.5)

    assert not param.grad[0].isfinite().all()
    assert param.grad[1].isfinite().all()


def on_a_mesh():
    """Clips parameters that are sharded over rows, over columns, over both, and not at all."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    kinds = [(mesh, [Shard(0), Shard(1)]), (mesh["data"], [Shard(0)]), (mesh["tp"], [Shard(0)]),
             None, (mesh, [Shard(0), Shard(0)])]  # fmt: skip
    params = []
    for param, kind in zip(make_params(), kinds, strict=True):
        values = [param.detach(), param.grad]
        values = values if kind is None else [distribute_tensor(one, *kind) for one in values]
        params.append(nn.Parameter(values[0]))
        params[-1].grad = values[1]
    share = clip_units_(params, 0.3)
    grads = [one.grad for one in params]
    return share, [one.full_tensor() if isinstance(one, DTensor) else one for one in grads]


def test_units_of_shards_are_clipped_as_in_one_process():
    """A rank may hold some units, or a part of each: norms are those of whole units."""
    params = make_params()
    expected = clip_units_(params, 0.3)
    assert 0 < expected < 1

    for share, grads in run_ranks(on_a_mesh, world_size=4):
        torch.testing.assert_close(share, expected)
        for grad, param in zip(grads, params, strict=True):
            torch.testing.assert_close(grad, param.grad)
