"""A hand-written loop, with the checkpoint that PyTorch's tutorials save after each epoch.

Source: https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from workload import SEED, Workload, adam

VERSION = torch.__version__


def train(workload: Workload) -> nn.Module:
    """Trains a workload; returns the trained model."""
    torch.manual_seed(SEED)
    model = workload.build_model()
    optimizer = adam(model)
    loader = workload.loader()
    first_epoch = 0
    checkpoint = Path(workload.folder, "checkpoint.pt")
    if workload.folder and checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first_epoch = saved["epoch"] + 1
    model.train()
    for epoch in range(first_epoch, workload.num_epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        if workload.folder:
            saved = {
                "epoch": epoch,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            torch.save(saved, checkpoint)
    return model
