"""A small GPT, that of `examples/charlm.py`, whose dropout doesn't depend on the layout of the ranks."""

from __future__ import annotations

import runpy
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode  # noqa: F401  imported before ranks are forked
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Allowed, Task, hookimpl, schedules
from eventloop_fsdp import Fsdp
from eventloop_muon import Muon
from eventloop_testing import isolated_trainer
from eventloop_tp import Tp

CHARLM = runpy.run_path(str(Path(__file__).parents[3] / "examples/charlm.py"))
NUM, CONTEXT, WIDTH = 240, 8, 64
TEXT = torch.randint(128, (NUM, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
SEQUENCE = {
    "characters": "replicated",
    "blocks.*.attention.0": "sequence",
    "blocks.*.attention.1.qkv": "colwise",
    "blocks.*.attention.1.out": "rowwise",
    "blocks.*.mlp.0": "sequence",
    "blocks.*.mlp.1": "colwise",
    "blocks.*.mlp.3": "rowwise",
    "norm": "sequence",
    "head": "colwise_gather_output",
}
LAYOUTS = {
    "ddp": (),
    "fsdp": (Fsdp,),
    "hsdp": (lambda: Fsdp(replicate=2),),
    "tp 4": (lambda: Tp(size=4),),
    "tp 2 x dp 2": (lambda: Tp(size=2),),
    "tp 2 x fsdp 2": (lambda: Tp(size=2), Fsdp),
    "sequence 4": (lambda: Tp(size=4, plan=SEQUENCE, sequence=True, loss_parallel=True),),
    "sequence 2 x fsdp 2": (lambda: Tp(size=2, plan=SEQUENCE, sequence=True), Fsdp),
}


class ByText(nn.Module):
    """Dropout whose mask follows from the text of each sample, for whoever computes it."""

    def __init__(self):
        super().__init__()
        self.texts = None

    def forward(self, hidden_BTC):
        if not self.training:
            return hidden_BTC
        seeds = (self.texts.cpu() * torch.arange(1, CONTEXT + 1)).sum(1).tolist()
        masks = [
            torch.rand(CONTEXT, WIDTH, generator=torch.Generator().manual_seed(seed)) > 0.1
            for seed in seeds
        ]
        masks_BTC = torch.stack(masks).to(hidden_BTC.device)
        if hidden_BTC.shape[1] < CONTEXT:  # this rank's part of the sequence
            at = torch.distributed.get_rank() % (CONTEXT // hidden_BTC.shape[1])
            masks_BTC = masks_BTC.chunk(CONTEXT // hidden_BTC.shape[1], dim=1)[at]
        return hidden_BTC * masks_BTC / 0.9


class GPT(CHARLM["GPT"]):
    """In float64, so that what is rounded to bf16 by Muon is rounded alike in all layouts."""

    def __init__(self):
        super().__init__(WIDTH, 2, 4)
        for block in self.blocks:
            block.mlp.append(ByText())
        self.double()

    def forward(self, characters_BT):
        for one in self.modules():
            if isinstance(one, ByText):
                one.texts = characters_BT
        return super().forward(characters_BT)


class Watches:
    """Keeps what a run has counted, and its rates."""

    def __init__(self):
        self.counts = []
        self.held = (0, 0)

    @hookimpl
    def batch_end(self, state):
        clock = state.clock
        rates = [group["lr"] for one in state.optimizers.values() for group in one.param_groups]
        self.counts.append((clock.batch, clock.sample, clock.token, rates))

    @hookimpl
    def fit_end(self, state):
        params = list(state.model.parameters())
        local = [getattr(one, "_local_tensor", one) for one in params]
        self.held = sum(one.numel() for one in local), sum(one.numel() for one in params)


def batches(state):
    """Yields this rank's part of 12 samples a step."""
    texts = TensorDataset(TEXT[:, :-1], TEXT[:, 1:])
    return DataLoader(texts, 12 // state.data_world_size)


def make_task(model=GPT, optimizer=None):
    return Task(
        model=model,
        loss=CHARLM["next_character_loss"],
        train_dataloader=batches,
        optimizer=optimizer or (lambda model: CHARLM["make_optimizer"](model, 2e-3)),
        scheduler=schedules.cosine(warmup="0.1dur"),
        num_tokens=lambda inputs: inputs.numel(),
    )


def train(folder, plugins=(), *, optimizer="adamw", num_data=1, until=None, task=None, **settings):
    """Trains 20 steps of 12 samples; returns weights, counts and how many numbers a rank holds."""
    watches = Watches()
    made = [one() for one in plugins] + ([Muon(lr=2e-3)] if optimizer == "muon" else [])
    task = task or make_task()
    allowed = Allowed(config_change=True, missing_plugin=("fsdp", "tp"))
    given = {"max_duration": "1920tok", "clip_norm": 0.5, "allowed": allowed, **settings}
    with isolated_trainer(folder, task, algorithms=[*made, watches], **given) as trainer:
        trainer.fit(until=until)
        path = trainer.export(folder / "model.safetensors")
    return (load_file(path) if path.exists() else {}), watches.counts, watches.held
