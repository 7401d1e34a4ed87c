"""The maths over shards."""

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from eventloop_muon.whole import whole_matrices
from eventloop_testing import run_ranks

VALUES, GRADIENTS = torch.randn(2, 3, 8, 6, generator=torch.Generator().manual_seed(0))


def stepped(made):
    """Steps three matrices twice; `made` says what a matrix becomes."""
    params = [nn.Parameter(made(one, idx)) for idx, one in enumerate(VALUES)]
    optimizer = optim.Muon(params, lr=0.1)
    for _ in range(2):
        for idx, (param, grad) in enumerate(zip(params, GRADIENTS, strict=True)):
            param.grad = made(grad, idx)
        optimizer.step()
    return params


def on_a_mesh():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    kinds = [(mesh, [Shard(0), Shard(1)]), (mesh["tp"], [Shard(0)]), (mesh["tp"], [Shard(1)])]
    with whole_matrices():
        params = stepped(lambda one, idx: distribute_tensor(one.clone(), *kinds[idx]))
    return [one.full_tensor() for one in params]


def test_shards_step_with_the_bits_of_whole_matrices():
    """Newton-Schulz over shards would add up in bf16, several times for each of its steps."""
    expected = stepped(lambda one, idx: one.clone())

    for actual in run_ranks(on_a_mesh, world_size=4):
        assert all(map(torch.equal, actual, expected))
