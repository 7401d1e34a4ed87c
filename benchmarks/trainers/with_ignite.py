"""PyTorch-Ignite: its DeterministicEngine and its Checkpoint handler.

Source: https://docs.pytorch.org/ignite/engine.html#resume-training
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ignite
import torch
from ignite.engine import Events
from ignite.engine.deterministic import DeterministicEngine
from ignite.handlers import Checkpoint, DiskSaver
from ignite.utils import manual_seed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from workload import SEED, Workload, adam

VERSION = ignite.__version__


def train(workload: Workload) -> nn.Module:
    """Trains a workload; returns the trained model."""
    manual_seed(SEED)
    model = workload.build_model()
    optimizer = adam(model)
    loader = workload.loader()

    def update(engine: Any, batch: tuple[Tensor, Tensor]) -> None:
        model.train()
        optimizer.zero_grad()
        inputs, targets = batch
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()

    if not workload.folder:
        ignite.engine.Engine(update).run(loader, max_epochs=workload.num_epochs)
        return model
    engine = DeterministicEngine(update)
    objects = {"model": model, "optimizer": optimizer, "engine": engine}
    saver = Checkpoint(objects, DiskSaver(workload.folder, require_empty=False), n_saved=None,
                       global_step_transform=lambda *_: engine.state.iteration)  # fmt: skip
    engine.add_event_handler(Events.ITERATION_COMPLETED(every=workload.save_interval), saver)
    paths = sorted(Path(workload.folder).glob("*.pt"), key=lambda path: path.stat().st_mtime)
    if paths:
        Checkpoint.load_objects(objects, torch.load(paths[-1], weights_only=False))
    engine.run(loader, max_epochs=workload.num_epochs)
    return model
