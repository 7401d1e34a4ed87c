"""Fine-tuning: a network that knows digits learns whether they are odd, its new head first.

pip install ./plugins/eventloop-finetune
eventloop fit examples/finetune.py
eventloop fit examples/digits.py --export digits.safetensors -p no:mixup
eventloop fit examples/finetune.py --task.weights digits.safetensors

The first convolution stays as it is, the rest of the backbone thaws after an epoch and learns at a tenth of the
head's rate; biases and norms aren't decayed.
"""

from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from eventloop import Task, schedules
from eventloop.toolbox import weights_at
from eventloop_finetune import Unfreeze, freeze, param_groups

# For `eventloop check-loss`: batch norms compute over the samples that they are given.
LOSS_LAWS_NOT_KEPT = {"microbatches": "batch norms", "ranks": "batch norms"}


class OddOrEven(nn.Module):
    """The backbone of `examples/digits.py` with a head of two logits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(2 * width * 4 * 4, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(images))


def make_model(width: int, weights: str) -> OddOrEven:
    """Makes the network, with a backbone that was trained before, and a part of it that stays."""
    model = OddOrEven(width)
    if weights:
        known = model.backbone.state_dict().keys()
        found = weights_at(Path(weights))
        model.backbone.load_state_dict({name: found[name] for name in known})
        freeze(model, "backbone.0")
    return model


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW, with options by the name of the parameter."""
    groups = param_groups(
        model,
        {
            "backbone": {"lr": lr / 10},
            "*.bias": {"weight_decay": 0.0},
            "backbone.[15].weight": {"weight_decay": 0.0},
        },
    )
    return torch.optim.AdamW(groups, lr, weight_decay=0.05)


def task(lr: float = 0.003, width: int = 32, weights: str = "", thaw: str = "1ep") -> Task:
    """Says what is trained; each parameter is an option, `--task.lr` and so on.

    Args:
        lr: learning rate of the head at its highest.
        width: channels of the first convolution, as in the run that made the weights.
        weights: a file that `eventloop fit examples/digits.py --export FILE` wrote; without one the
            backbone begins at random.
        thaw: when the backbone is trained, too.
    """
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(
        torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16,
        torch.tensor(labels) % 2,
    )
    train, test = random_split(dataset, [0.8, 0.2], torch.Generator().manual_seed(0))
    return Task(
        model=lambda: make_model(width, weights),
        loss=nn.functional.cross_entropy,
        train_dataloader=DataLoader(train, 64, shuffle=True),
        eval_dataloaders={"test": DataLoader(test, 256)},
        optimizer=lambda model: make_optimizer(model, lr),
        scheduler=schedules.cosine(warmup="0.1dur"),
        metrics={"accuracy": MulticlassAccuracy(2, average="micro")},
        algorithms=[Unfreeze({"backbone": thaw})],
        settings={"max_duration": "5ep"},
    )
