"""Several losses: one network names digits and draws them again, from a few numbers in between.

eventloop fit examples/losses.py
eventloop fit examples/losses.py --task.draw 3 --microbatch-size 16

Each loss is a mean over samples, as their sum is; each is logged by itself.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from eventloop import State, Task, schedules


class Bottleneck(nn.Module):
    """Squeezes an image into a code, from which it is named and drawn."""

    def __init__(self, width: int, num_code: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, num_code))
        self.decoder = nn.Sequential(nn.Linear(num_code, width), nn.ReLU(), nn.Linear(width, 64))
        self.head = nn.Linear(num_code, 10)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        code = self.encoder(images)
        return self.head(code), self.decoder(code)


def task(
    lr: float = 0.003, name: float = 1.0, draw: float = 10.0, width: int = 64, num_code: int = 8
) -> Task:
    """Says what is trained; each parameter is an option, `--task.lr` and so on.

    Args:
        lr: learning rate at the start; it falls to zero over the run, along a cosine.
        name: weight of the loss of a wrong name.
        draw: weight of the loss of a picture.
        width: of the hidden layers.
        num_code: how many numbers are left of an image.
    """
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))

    def forward(
        model: nn.Module, inputs: Tensor, targets: Tensor, state: State
    ) -> dict[str, Tensor]:
        logits, drawn = model(inputs)
        losses = {"name": cross_entropy(logits, targets), "draw": mse_loss(drawn, inputs)}
        for part, loss in losses.items():
            state.log(f"loss/{part}", loss, "mean")
        return {"loss": name * losses["name"] + draw * losses["draw"]}

    return Task(
        model=lambda: Bottleneck(width, num_code),
        forward=forward,
        train_dataloader=DataLoader(dataset, 64, shuffle=True),
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr),
        scheduler=schedules.cosine(),
        settings={"max_duration": "10ep"},
    )
