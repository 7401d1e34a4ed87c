"""Makes one step of the small network of gpu_workloads.py; prints when it was done.

    python benchmarks/gpu_first_step.py plain|ours DEVICE

The loop by hand imports nothing of eventloop.
"""

from __future__ import annotations

import sys
import time

import torch
from gpu_workloads import Workload, workloads


def plain(
    workload: Workload, batches: list[tuple[torch.Tensor, torch.Tensor]], device: str
) -> None:
    """Trains by hand."""
    model = workload.make_model().to(device).train()
    optimizer = workload.make_optimizer(model)
    for inputs, targets in batches:
        with torch.autocast(device, torch.bfloat16):
            loss = workload.loss(model(inputs.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def ours(workload: Workload, batches: list[tuple[torch.Tensor, torch.Tensor]], device: str) -> None:
    """Trains with eventloop."""
    from eventloop import Task, Trainer

    task = Task(model=workload.make_model, loss=workload.loss, train_dataloader=batches,
                optimizer=workload.make_optimizer)  # fmt: skip
    with Trainer(
        task, autoload=False, device=device, precision="bf16", max_duration="1ba"
    ) as trainer:
        trainer.fit()


if __name__ == "__main__":
    who, device = sys.argv[1:]
    workload = workloads(tiny=device == "cpu")["small_cnn"]
    batch = workload.make_batch(workload.batch_size, torch.Generator().manual_seed(0))
    {"plain": plain, "ours": ours}[who](workload, [batch], device)
    if device != "cpu":
        torch.accelerator.synchronize()
    print(time.time())
