"""Clipping of gradients: by norm, then by value, whole and sharded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from eventloop.training.gradient_clipping import GradientClipping
from eventloop_testing import run_ranks

SHAPES = [(8, 6), (7, 4), (5,), (4, 4), (3,), (6, 2), ()]


def gradients(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def mixture(grads, mesh):
    """Sharded over both dimensions, over one, over a mesh of one, over none."""
    tp, data = mesh["tp"], mesh["data"]
    kinds = [(mesh, [Shard(0), Shard(1)]), (tp, [Shard(0)]), None, (mesh, [Replicate(), Shard(0)]),
             (data, [Shard(0)]), (mesh, [Shard(0), Shard(0)]), None]  # fmt: skip
    return [
        one.clone() if kind is None else distribute_tensor(one.clone(), *kind)
        for one, kind in zip(grads, kinds, strict=True)
    ]


def with_gradients(grads):
    params = [nn.Parameter(torch.zeros_like(one)) for one in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return params


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clipped(bad, dtype):
    """Returns the norm, how often ranks summed, and the clipped gradients, whole."""
    dist.init_process_group("gloo")
    grads = gradients(dtype)
    if bad is not None:
        grads[0][0, 0] = bad
    params = with_gradients(
        mixture(grads, init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp")))
    )
    state = SimpleNamespace(
        settings=SimpleNamespace(clip_norm=1.0, clip_value=0.1),
        model=SimpleNamespace(parameters=lambda: params),
    )
    with CommDebugMode() as counting:
        logged = GradientClipping()(state, {"all": torch.optim.SGD(params)})
    return logged["grad_norm"], counting.get_total_counts(), [whole(one.grad) for one in params]


@pytest.mark.parametrize(
    ("bad", "dtype"), [(None, torch.float32), (float("inf"), torch.float32), (None, torch.float64)]
)
def test_mixed_gradients_are_clipped_as_in_one_process(bad, dtype):
    """Each entry counts once, what is replicated too; two dimensions take two sums."""
    grads = gradients(dtype)
    if bad is not None:
        grads[0][0, 0] = bad
    expected = with_gradients(grads)
    norm = clip_grad_norm_(expected, 1.0)
    clip_grad_value_(expected, 0.1)

    ranks = run_ranks(clipped, bad, dtype, world_size=4)

    for found, num_sums, actual in ranks:
        assert num_sums == 2
        assert type(found) is torch.Tensor
        assert torch.equal(found, ranks[0][0])  # replicated weights stay alike, to the bit
        torch.testing.assert_close(found, norm)
        for one, param in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, param.grad, equal_nan=True)


def test_gradients_are_clipped_by_norm_then_by_value(make_trainer, make_task, make_plugin):
    """The norm that is logged is that of the batch; clipped by value first it would be another."""
    grads, rows = [], []

    def write(state):
        for param, value in zip(state.model.parameters(), (3.0, 0.0), strict=True):
            param.grad = torch.full_like(param, value)

    made = make_plugin(
        after_backward=write,
        after_train_batch=lambda state: grads.extend(p.grad for p in state.model.parameters()),
        log=lambda numbers: rows.append(numbers),
    )
    settings = {"clip_norm": 4.5, "clip_value": 1.0, "max_duration": "1ba"}
    make_trainer(algorithms=[made], **settings).fit()

    # 9 weights of 3.0 have the norm 9; at 4.5 each is 1.5, which is clipped to 1.
    assert rows[0]["train/grad_norm"] == 9.0
    torch.testing.assert_close(grads[0].cpu(), torch.ones(3, 3), rtol=0, atol=0)


@pytest.mark.parametrize("clip", [{"clip_norm": 0.01}, {"clip_value": 0.01}])
def test_either_bound_is_kept_without_the_other(clip, make_trainer, make_plugin):
    """A run without one has larger gradients."""
    sizes = []

    def after_train_batch(state):
        sizes.append(max(param.grad.abs().max().item() for param in state.model.parameters()))

    for given in ({}, clip):
        plugin = make_plugin(after_train_batch=after_train_batch)
        make_trainer(callbacks=[plugin], max_duration="1ba", **given).fit()

    assert sizes[0] > 0.02
    assert sizes[1] <= 0.010001


def test_the_norm_is_summed_in_the_order_of_the_model(make_trainer, make_task, make_plugin):
    """As in a plain loop over `model.parameters()`: float sums in the order of groups have other bits."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(97, generator=generator) * 10 ** (index % 3) for index in range(8)]

    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.scales = nn.ParameterList(torch.ones(97) for _ in gradients)

        def forward(self, inputs):
            return inputs * sum(scale.sum() for scale in self.scales)

    def second_half_first(model):
        params = list(model.parameters())
        return torch.optim.SGD([{"params": params[4:]}, {"params": params[:4]}], lr=0.1)

    def write(state):
        for param, gradient in zip(state.model.parameters(), gradients, strict=True):
            param.grad = gradient.to(param.device, copy=True)

    rows = []
    plugin = make_plugin(after_backward=write, log=lambda numbers: rows.append(numbers))
    task = make_task(model=Scales, optimizer=second_half_first)
    make_trainer(task, algorithms=[plugin], max_duration="1ba", clip_norm=1.0).fit()

    expected, of_groups = (
        nn.utils.get_total_norm(order).item()
        for order in (gradients, gradients[4:] + gradients[:4])
    )
    assert rows[0]["train/grad_norm"] == expected
    assert expected != of_groups
