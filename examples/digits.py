"""Handwritten digits: a small convolutional network on a data set that scikit-learn carries.

eventloop fit examples/digits.py
eventloop fit examples/digits.py --task.lr 0.01 --max-duration 5ep -p no:mixup
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from eventloop import Task, schedules

# For `eventloop check-loss`: batch norms compute over the samples that they are given.
LOSS_LAWS_NOT_KEPT = {"microbatches": "batch norms", "ranks": "batch norms"}


def make_model(width: int) -> nn.Module:
    """Two convolutions and a linear layer; images of shape (B, 1, H, W) in, 10 logits out."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),  # images of 8 x 8 are 4 x 4 by now; others shall be, too
        nn.Flatten(), nn.Linear(2 * width * 4 * 4, 10),
    )  # fmt: skip


def task(lr: float = 0.1, batch_size: int = 64, width: int = 32) -> Task:
    """Says what is trained; each parameter is an option, `--task.lr` and so on.

    Args:
        lr: learning rate at the start; it falls to zero over the run, along a cosine.
        batch_size: images a step.
        width: channels of the first convolution.
    """
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(
        torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16,
        torch.tensor(labels),
    )
    train, test = random_split(dataset, [0.8, 0.2], torch.Generator().manual_seed(0))
    return Task(
        model=lambda: make_model(width),
        loss=nn.functional.cross_entropy,
        train_dataloader=DataLoader(train, batch_size, shuffle=True),
        eval_dataloaders={"test": DataLoader(test, 256)},
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr, momentum=0.9),
        scheduler=schedules.cosine(),
        metrics={"accuracy": MulticlassAccuracy(10, average="micro")},
        settings={"max_duration": "15ep"},
    )
