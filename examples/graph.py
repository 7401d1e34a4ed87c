"""One big graph: a graph network finds four circles of friends, of whom it is told a few.

eventloop fit examples/graph.py
eventloop fit examples/graph.py --task.num-known 2

The graph is in the model, and every step takes all of it: there is no train data loader. Evaluation asks for the
people that the model wasn't told of.
"""

# P = people, F = features, K = circles

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, relu
from torchmetrics.classification import MulticlassAccuracy

from eventloop import Task

NUM_CIRCLES = 4


def make_graph(num_people: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draws friendships, mostly within a circle, and features that hint at it; the same each time.

    Returns:
        Who belongs where, of shape (P,), who is a friend of whom, (P, P), and features, (P, K).
    """
    generator = torch.Generator().manual_seed(0)
    circles_P = torch.arange(num_people) % NUM_CIRCLES
    is_same_PP = circles_P[:, None] == circles_P
    chance_PP = torch.where(is_same_PP, 0.10, 0.01)
    drawn_PP = (torch.rand(num_people, num_people, generator=generator) < chance_PP).triu(1)
    noise_PK = torch.randn(num_people, NUM_CIRCLES, generator=generator)
    features_PK = nn.functional.one_hot(circles_P, NUM_CIRCLES) + 2.0 * noise_PK
    return circles_P, (drawn_PP | drawn_PP.T).float(), features_PK


class GraphNetwork(nn.Module):
    """Two layers, each of which mixes what friends know; logits of all people, shape (P, K).

    Source: Kipf & Welling 2017, arXiv:1609.02907, equation 9.
    """

    mixing: Tensor
    features: Tensor

    def __init__(self, friends_PP: Tensor, features_PF: Tensor, width: int) -> None:
        super().__init__()
        mixed_PP = normalize(friends_PP + torch.eye(len(friends_PP)), p=1, dim=1)
        self.register_buffer("mixing", mixed_PP, persistent=False)
        self.register_buffer("features", features_PF, persistent=False)
        self.first = nn.Linear(features_PF.shape[1], width)
        self.second = nn.Linear(width, NUM_CIRCLES)

    def forward(self) -> Tensor:
        mixed_PW = relu(self.mixing @ self.first(self.features))
        return self.mixing @ self.second(mixed_PW)


def task(lr: float = 0.01, num_people: int = 400, num_known: int = 5, width: int = 16) -> Task:
    """Says what is trained; each parameter is an option, `--task.lr` and so on.

    Args:
        lr: learning rate.
        num_people: size of the graph.
        num_known: people of each circle of whom the model is told.
        width: of the hidden layer.
    """
    circles_P, friends_PP, features_PF = make_graph(num_people)
    split = num_known * NUM_CIRCLES
    unknown = torch.arange(split, num_people)

    def forward(model: nn.Module, batch: Any) -> Tensor | dict[str, Tensor]:
        logits_PK = model()
        if batch:  # of an evaluation
            return logits_PK[batch[0]]
        told_P = circles_P[:split].to(logits_PK.device)
        return {"loss": cross_entropy(logits_PK[:split], told_P)}

    return Task(
        model=lambda: GraphNetwork(friends_PP, features_PF, width),
        forward=forward,
        eval_dataloaders={"unknown": [(unknown, circles_P[unknown])]},
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr, weight_decay=5e-4),
        metrics={"accuracy": MulticlassAccuracy(NUM_CIRCLES, average="micro")},
        num_samples=lambda batch: len(batch[0]) if batch else split,
        settings={"max_duration": "200ba", "eval_interval": "50ba", "log_interval": "10ba"},
    )
