"""The loops that gpu_gates.py compares eventloop with, as their documents show them.

Each trains on ready batches in pinned memory, in bf16 under autocast, without clipping, logging,
progress or checkpoints.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from gpu_workloads import Batch, Workload
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

Train = Callable[[Workload, "Source", torch.device, int], None]


class Source(Dataset[Batch]):
    """Ready batches, again and again; calls `seen` with the number of each before it gives it."""

    def __init__(self, batches: list[Batch], num_steps: int, seen: Callable[[int], None]) -> None:
        self._batches = batches
        self._num_steps = num_steps
        self._seen = seen

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, idx: int) -> Batch:
        self._seen(idx)
        return self._batches[idx % len(self._batches)]

    def loader(self) -> DataLoader[Batch]:
        """Returns a data loader that gives them as they are."""
        return DataLoader(self, batch_size=None)


def made(workload: Workload) -> nn.Module:
    """Returns the network, with the layout that an expert gives it."""
    torch.manual_seed(0)
    model = workload.make_model()
    return model.to(memory_format=torch.channels_last) if workload.is_convolutional else model


def by_lightning(workload: Workload, source: Source, device: torch.device, num_steps: int) -> None:
    """Trains with Lightning."""
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = made(workload)

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            inputs, targets = batch
            return workload.loss(self.model(inputs), targets)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return workload.make_optimizer(self.model)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu", devices=1, precision="bf16-mixed",
        max_steps=num_steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, benchmark=True,
    )  # fmt: skip
    trainer.fit(Module(), source.loader())


def by_hf_trainer(workload: Workload, source: Source, device: torch.device, num_steps: int) -> None:
    """Trains with the Trainer of Hugging Face's transformers."""
    from transformers import Trainer, TrainingArguments

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = made(workload)

        def forward(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
            return {"loss": workload.loss(self.model(inputs), targets)}

    class Ready(Dataset[dict[str, Tensor]]):
        def __len__(self) -> int:
            return len(source)

        def __getitem__(self, idx: int) -> dict[str, Tensor]:
            inputs, targets = source[idx]
            return {"inputs": inputs, "targets": targets}

    class OfReadyBatches(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(DataLoader(Ready(), batch_size=None))

    model = WithLoss().to(device)
    optimizer = workload.make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder, max_steps=num_steps, bf16=True, max_grad_norm=0, save_strategy="no",
            report_to="none", logging_strategy="no", disable_tqdm=True, use_cpu=device.type == "cpu",
        )  # fmt: skip
        OfReadyBatches(
            model, options, train_dataset=Ready(), optimizers=(optimizer, scheduler)
        ).train()


def by_accelerate(workload: Workload, source: Source, device: torch.device, num_steps: int) -> None:
    """Trains with a loop by hand over what Accelerate prepares."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=device.type == "cpu")
    model = made(workload).to(device)
    model, optimizer, loader = accelerator.prepare(
        model, workload.make_optimizer(model), source.loader()
    )
    for _, (inputs, targets) in zip(range(num_steps), loader, strict=False):
        loss = workload.loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def by_eventloop(workload: Workload, source: Source, device: torch.device, num_steps: int) -> None:
    """Trains with eventloop."""
    from eventloop import Task, Trainer

    task = Task(model=workload.make_model, loss=workload.loss, train_dataloader=source.loader(),
                optimizer=workload.make_optimizer)  # fmt: skip
    given: Any = {"device": str(device), "precision": "bf16", "max_duration": f"{num_steps}ba"}
    with Trainer(task, autoload=False, **given) as trainer:
        trainer.fit()


RIVALS: dict[str, Train] = {
    "Lightning": by_lightning,
    "HF Trainer": by_hf_trainer,
    "Accelerate": by_accelerate,
}


def quiet() -> None:
    """Silences what they say of themselves."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
