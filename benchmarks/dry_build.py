"""Dry build: what a rank of a large mesh holds of a Llama, and what it sends in a step; no weight is made.

    python benchmarks/dry_build.py [--data 8] [--tp 16] [--json]

This process is rank 0 of so many ranks, in torch's fake group, whose collectives return at once. The model
is the configuration of Llama 2 with 7 billion parameters, of tensors that have shapes and no memory. It is
divided and sharded as `eventloop-tp` and `eventloop-fsdp` do it, and makes a step of AdamW on one text.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode  # torch has no public one (torch 2.13)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore  # nor of this one
from transformers import LlamaConfig, LlamaForCausalLM

from eventloop.toolbox import local
from eventloop_fsdp.deferred_init import give_memory
from eventloop_fsdp.sharding import parts_of, shard
from eventloop_tp.plans import plan_of, resolved
from eventloop_tp.styles import add_up_gradients, divide

NAMES = {"all_reduce": "all_reduce", "allreduce_": "all_reduce", "all_gather_into_tensor": "all_gather",
         "_allgather_base_": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
         "_reduce_scatter_base_": "reduce_scatter"}  # fmt: skip


def build(mesh: DeviceMesh) -> tuple[nn.Module, dict[str, Any]]:
    """Returns the model as rank 0 has it, and what it took."""
    start = time.perf_counter()
    data, tp = mesh.shape
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(dtype="float32"))
    num_params = sum(one.numel() for one in model.parameters())
    made = time.perf_counter() - start
    if tp > 1:
        divide(model, resolved(model, plan_of(model), tp), mesh["tp"])
    if data > 1:
        shard(model, parts_of(model), mesh["data"], policy=MixedPrecisionPolicy())
    held = sum(local(one).numel() for one in model.parameters())
    seconds = {"made": made, "divided": time.perf_counter() - start - made}
    return model, {"parameters": num_params, "held": held, "seconds": seconds}


def step(model: nn.Module, length: int) -> dict[str, Any]:
    """Returns the collectives of a step by kind, and the seconds of the host."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens = torch.zeros((1, length), dtype=torch.long)
    start = time.perf_counter()
    with CommDebugMode() as counting:
        model(input_ids=tokens, use_cache=False).logits.float().mean().backward()
        add_up_gradients([*model.parameters()])
        optimizer.step()
    kinds: Counter[str] = Counter()
    for one, num in counting.get_comm_counts().items():
        name = one.__name__ if hasattr(one, "__name__") else str(one).rpartition(".")[2]
        kinds[NAMES.get(name, name)] += num
    states = sum(
        local(value).numel()
        for state in optimizer.state.values()
        for value in state.values()
        if value.ndim
    )
    return {"collectives": dict(kinds), "states": states, "step_s": time.perf_counter() - start}


def main() -> None:
    """Prints what a rank holds and sends."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=int, default=8)
    parser.add_argument("--tp", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    world_size = given.data * given.tp
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    sizes = given.data, given.tp
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tp"))
    model, found = build(mesh)
    with FakeTensorMode(allow_non_fake_inputs=True):
        give_memory(model, torch.device("cpu"))
        found |= step(model, given.length)
    if given.json:
        print(json.dumps(found))
        return
    whole, held = found["parameters"], found["held"]
    # Parameters, gradients and the two states of AdamW, in fp32.
    print(f"{whole:,} parameters, {held:,} a rank of {given.data} x {given.tp}")
    print(
        f"{(2 * held + found['states']) * 4 / 1e9:.2f} GB a rank, {whole * 16 / 1e9:.1f} GB in one process"
    )
    print(f"collectives of a step: {found['collectives']}")
    print(f"seconds: {found['seconds']}, a step {found['step_s']:.1f}")


if __name__ == "__main__":
    main()
