"""Reinforcement learning without a data set: REINFORCE on a walk to a door, which the policy must find.

eventloop fit examples/reinforce.py
eventloop fit examples/reinforce.py --task.lr 0.02 --max-duration 300ba

There is no data loader: a batch is what the policy lives through, and `forward` walks it. The run is counted in
batches, and in samples, of which each walker is one.
"""

# B = walkers, S = places, T = steps

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from eventloop import State, Task

NUM_PLACES, NUM_STEPS = 9, 20
DOOR, CLIFF = 7, 0
# For `eventloop check-loss`: a policy walks by chance.
LOSS_LAWS_NOT_KEPT = {"draws": "the walks are drawn anew"}


def walk(model: nn.Module, num_walkers: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Walks from the middle, a step to the left or right at a time, until the door or the cliff.

    Returns:
        The logarithms of the probabilities of the steps taken, and the rewards: 1 at the door, -1 at the
        cliff, -0.02 a step before. Both of shape (T, B), and 0 afterwards.
    """
    device = generator.device
    places_B = torch.full((num_walkers,), NUM_PLACES // 2, device=device)
    is_walking_B = torch.ones(num_walkers, dtype=torch.bool, device=device)
    logs, rewards = [], []
    for _ in range(NUM_STEPS):
        right_B = torch.sigmoid(model(one_hot(places_B, NUM_PLACES).float()).squeeze(1))
        goes_B = torch.rand(num_walkers, generator=generator, device=device) < right_B
        logs.append(torch.where(goes_B, right_B, 1 - right_B).log() * is_walking_B)
        places_B = torch.where(is_walking_B, places_B + 2 * goes_B - 1, places_B)
        ends_B = (places_B == DOOR) | (places_B == CLIFF)
        reward_B = torch.where(ends_B, (places_B == DOOR) * 2.0 - 1.0, -0.02)
        rewards.append(reward_B * is_walking_B)
        is_walking_B = is_walking_B & ~ends_B
    return torch.stack(logs), torch.stack(rewards)


def task(lr: float = 0.05, num_walkers: int = 64, width: int = 16) -> Task:
    """Says what is trained; each parameter is an option, `--task.lr` and so on.

    Args:
        lr: learning rate.
        num_walkers: walks of a batch.
        width: of the policy's hidden layer.
    """

    def forward(model: nn.Module, state: State) -> dict[str, Tensor]:
        """Walks, and returns what the walks cost.

        Source: Williams 1992, doi:10.1007/BF00992696, equation 11, with the mean as baseline.
        """
        logs_TB, rewards_TB = walk(model, num_walkers, state.generator("walks"))
        to_come_TB = rewards_TB.flip(0).cumsum(0).flip(0)
        advantages_TB = to_come_TB - to_come_TB.mean(1, keepdim=True)
        state.log("reward", rewards_TB.sum(0).mean(), "mean")
        return {"loss": -(logs_TB * advantages_TB.detach()).sum(0).mean()}

    return Task(
        model=lambda: nn.Sequential(nn.Linear(NUM_PLACES, width), nn.Tanh(), nn.Linear(width, 1)),
        forward=forward,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr),
        num_samples=lambda: num_walkers,
        settings={"max_duration": "200ba", "log_interval": "10ba"},
    )
