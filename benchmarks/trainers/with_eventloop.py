"""eventloop: a task and its Trainer. The same command resumes a run that was killed."""

from __future__ import annotations

from torch import nn
from torch.nn.functional import cross_entropy
from workload import SEED, Workload, adam

import eventloop
from eventloop import Task, Trainer

VERSION = eventloop.__version__


def train(workload: Workload) -> nn.Module:
    """Trains a workload; returns the trained model."""
    task = Task(
        model=workload.build_model,
        loss=cross_entropy,
        train_dataloader=workload.loader(),
        optimizer=adam,
    )
    checkpoints = {}
    if workload.folder:
        checkpoints = {
            "run_dir": workload.folder,
            "checkpoint_interval": f"{workload.save_interval}ba",
        }
    with Trainer(
        task, max_duration=f"{workload.num_epochs}ep", seed=SEED, autoload=False, **checkpoints
    ) as trainer:
        trainer.fit()
        return trainer.state.model
