"""Norms over plain and sharded tensors of several meshes: those of one process, in a sum a dimension."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from eventloop.toolbox import total_norm
from eventloop.training.sharded_tensors import clip_
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
    with CommDebugMode() as counting:
        logged = clip_(params, 1.0, 0.1)
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


def test_norms_of_plain_tensors_keep_their_bits():
    """A run without shards is that of a plain loop."""
    expected = torch.nn.utils.get_total_norm(gradients())

    assert torch.equal(total_norm(gradients()), expected)


def of_sum():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    try:
        total_norm([DTensor.from_local(torch.ones(3), mesh, [Partial()])])
    except TypeError as error:
        return str(error)


def test_what_is_a_sum_as_yet_has_no_norm():
    """The norm of a sum isn't that of the ranks' norms: a wrong number would be worse."""
    for message in run_ranks(of_sum):
        assert "(Partial) has no norm" in message


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, inputs):
        return self.outer(torch.tanh(self.inner(inputs)))


def of_fsdp(model, inputs):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model.inner, mesh=mesh)  # the other layer stays plain
    model(inputs).square().mean().backward()
    with CommDebugMode() as counting:
        norm = total_norm([one.grad for one in model.parameters()])
    return norm, counting.get_total_counts()


def test_copies_of_shards_count_once():
    """FSDP over two by two ranks, with a layer that each rank has whole: one sum."""
    torch.manual_seed(0)
    model, inputs = Net(), torch.randn(8, 4)
    alone = copy.deepcopy(model)
    alone(inputs).square().mean().backward()
    expected = torch.nn.utils.get_total_norm([one.grad for one in alone.parameters()])

    for norm, num_sums in run_ranks(of_fsdp, model, inputs, world_size=4):
        torch.testing.assert_close(norm, expected)
        assert num_sums == 1
