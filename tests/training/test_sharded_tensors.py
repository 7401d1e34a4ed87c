"""Norms over plain and sharded tensors of several meshes: those of one process, in a sum a dimension."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.debug import CommDebugMode

from eventloop.toolbox import total_norm
from eventloop_testing import run_ranks


def gradients():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in [(8, 6), (7, 4), (5,), ()]]


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
        assert "placement is Partial has no norm" in message


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
