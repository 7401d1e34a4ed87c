"""The strategy: how Lightning's trainer steps, reduces and saves where eventloop runs the loop."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _sync_ddp_if_available
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import ParallelStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor
from torch.optim import Optimizer


class RunsOnLoop(Strategy):
    """Base of the strategies for a single process and for several.

    Attributes:
        step: makes a step with an optimizer; None outside of a fit.
        manual_backward: adds the gradients of a loss; None without manual optimization.
        files: completes written files; None before the first fit.
    """

    step: Callable[..., Any] | None = None
    manual_backward: Callable[..., None] | None = None
    files: Any = None

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Makes the step as the loop does."""
        if self.step is not None:
            return self.step(optimizer, closure, **kwargs)
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Runs a backward pass that the module requests, and averages gradients over the ranks."""
        if self.manual_backward is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        self.manual_backward(closure_loss, self.average, *args, **kwargs)
        return closure_loss.detach()

    def average(self) -> None:
        """Averages the gradients over the ranks, if there are several."""

    def seed(self) -> None:
        """Seeds again before a fit, if Lightning does."""

    def release(self) -> None:
        """Returns control to Lightning after a fit."""
        self.step = self.manual_backward = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Saves a checkpoint file, from which a run can resume once the batch is done."""
        if self.files is not None:
            self.files.take(checkpoint, filepath, storage_options)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a file, and cancels its completion."""
        super().remove_checkpoint(filepath)
        if self.files is not None:
            self.files.drop(filepath)


class OneProcess(RunsOnLoop, SingleDeviceStrategy):
    """A single process on a single device."""


class Ranks(RunsOnLoop, ParallelStrategy):
    """One of several processes started by torchrun or `eventloop fit --nproc`.

    eventloop creates the process group, and averages gradients under automatic optimization.

    Args:
        device: the device of this process.
    """

    is_distributed = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._root_device = device

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        return self._root_device

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
        """The number of processes."""
        return int(os.environ["WORLD_SIZE"])

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments for a distributed sampler of this rank."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def seed(self) -> None:
        """Resets to the seed of `seed_everything`, if any, as Lightning does on several ranks."""
        reset_seed()

    def setup_environment(self) -> None:
        """Called before validation, test and prediction."""
        self.seed()
        super().setup_environment()

    def model_to_device(self) -> None:
        """Moves the model to the device of this process, where DDP may hold its parameters already."""
        assert self.model is not None
        if any(param.device != self.root_device for param in self.model.parameters()):
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
        """Returns the object of a source rank on all ranks."""
        if not dist.is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def average(self) -> None:
        """Averages the gradients of all trainable parameters over the ranks."""
        assert self.lightning_module is not None
        for param in self.lightning_module.parameters():
            if param.grad is not None and param.requires_grad:
                dist.all_reduce(param.grad)
                param.grad /= self.world_size

    def teardown(self) -> None:
        """Moves the model back to the host; the process group stays."""
        Strategy.teardown(self)


def strategy_for(device: torch.device) -> OneProcess | Ranks:
    """Returns the strategy of this process, by torchrun's environment variables."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return Ranks(device)
    return OneProcess(device)
