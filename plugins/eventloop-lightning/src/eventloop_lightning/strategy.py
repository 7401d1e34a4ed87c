"""The strategy: how Lightning's trainer steps, reduces and saves where eventloop runs the loop."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _sync_ddp_if_available
from lightning.pytorch.strategies import ParallelStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor
from torch.optim import Optimizer

# What a file of Lightning's is accompanied by: a checkpoint of eventloop's, a folder.
BESIDE = ".eventloop"


class RunsOnLoop(Strategy):
    """What the strategies of one process and of several have in common.

    Attributes:
        step: makes a step with an optimizer; None outside of automatic optimization.
        write_beside: writes a checkpoint of eventloop's to a folder; None outside of a fit.
    """

    step: Callable[..., Any] | None = None
    write_beside: Callable[[Path], None] | None = None

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Has the loop make the step under automatic optimization."""
        if self.step is not None:
            return self.step(optimizer, closure, **kwargs)
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Writes Lightning's file, and a checkpoint beside it from which a run goes on exactly."""
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        if self.write_beside is not None and "://" not in str(filepath):
            self.write_beside(beside(filepath))

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes both."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero and "://" not in str(filepath):
            shutil.rmtree(beside(filepath), ignore_errors=True)


class OneProcess(RunsOnLoop, SingleDeviceStrategy):
    """One process on one device."""


class Ranks(RunsOnLoop, ParallelStrategy):
    """One of several processes, which torchrun or `eventloop fit --nproc` has started.

    The process group is eventloop's; gradients are averaged by it under automatic optimization.

    Args:
        device: of this process.
    """

    is_distributed = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        return self._device

    @property
    def global_rank(self) -> int:
        """The number of this process."""
        return int(os.environ["RANK"])

    @property
    def local_rank(self) -> int:
        """Its number on this machine."""
        return int(os.environ["LOCAL_RANK"])

    @property
    def node_rank(self) -> int:
        """The number of this machine."""
        return int(os.environ.get("GROUP_RANK", "0"))

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return int(os.environ["WORLD_SIZE"])

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """What a sampler of this rank is made with."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def model_to_device(self) -> None:
        """Moves the model to the device of this process."""
        assert self.model is not None
        self.model.to(self.root_device)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over the ranks."""
        if isinstance(tensor, Tensor):
            return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)
        return tensor

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks."""
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns the object of one rank on all."""
        if not dist.is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Runs a backward pass of manual optimization, and averages the gradients over the ranks."""
        module = self.lightning_module
        assert module is not None
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
        for param in module.parameters():
            if param.grad is not None and param.requires_grad:
                dist.all_reduce(param.grad)
                param.grad /= self.world_size
        return self.precision_plugin.post_backward(loss, module)

    def teardown(self) -> None:
        """Moves the model back to the host; the process group stays."""
        Strategy.teardown(self)


def strategy_for(device: torch.device) -> OneProcess | Ranks:
    """Returns the strategy of this process: what torchrun's variables tell of."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return Ranks(device)
    return OneProcess(device)


def beside(filepath: Any) -> Path:
    """Returns the folder of eventloop's checkpoint beside a file of Lightning's."""
    return Path(f"{filepath}{BESIDE}")
