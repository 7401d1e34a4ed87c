"""Reinforcement learning with minibatches: PPO balances poles on carts.

eventloop fit examples/ppo.py
eventloop fit examples/ppo.py --nproc 2 --max-duration 40ba

Each batch lets the policy drive for a while, then goes over what came of it in minibatches: `Ppo` owns
`train_batch`, puts them into `state.batch`, and makes an update of each. The carts are part of its
state, so that a run that is stopped goes on with the poles as they stood.
"""

# N = carts, T = steps, O = numbers that say how a cart stands: place, speed, angle, speed of the angle

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, mse_loss

from eventloop import State, StepOutcome, Task, hookimpl, schedules

MOST_STEPS = 200
# For `eventloop check-loss`: a policy drives by chance.
LOSS_LAWS_NOT_KEPT = {"draws": "the carts are driven anew"}


class Carts:
    """Many carts with a pole each, pushed to the left or right; one that has failed begins anew.

    Source: Barto, Sutton & Anderson 1983, doi:10.1109/TSMC.1983.6313077, with the constants of
    Gymnasium's CartPole.
    """

    def __init__(self, num: int) -> None:
        self.standing_NO = torch.zeros(num, 4)
        self.num_steps_N = torch.zeros(num, dtype=torch.int64)
        self.is_new = True

    def begin(self, generator: torch.Generator) -> None:
        """Places all carts, on the generator's device."""
        shape, device = self.standing_NO.shape, generator.device
        self.standing_NO = torch.rand(shape, generator=generator, device=device) * 0.1 - 0.05
        self.num_steps_N = self.num_steps_N.to(device)
        self.is_new = False

    def push(self, right_N: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Pushes each cart; returns which have failed, and which had balanced long enough."""
        place, speed, angle, turning = self.standing_NO.unbind(1)
        force = 20.0 * right_N - 10.0
        pull = (force + 0.05 * turning.square() * angle.sin()) / 1.1
        bend = (9.8 * angle.sin() - angle.cos() * pull) / (
            0.5 * (4 / 3 - 0.1 * angle.cos().square() / 1.1)
        )
        gain = pull - 0.05 * bend * angle.cos() / 1.1
        moved = (place + 0.02 * speed, speed + 0.02 * gain,
                 angle + 0.02 * turning, turning + 0.02 * bend)  # fmt: skip
        self.standing_NO, self.num_steps_N = torch.stack(moved, 1), self.num_steps_N + 1
        fails_N = (moved[0].abs() > 2.4) | (moved[2].abs() > math.radians(12))
        is_over_N = ~fails_N & (self.num_steps_N >= MOST_STEPS)
        ends_N = fails_N | is_over_N
        fresh_NO = torch.rand(self.standing_NO.shape, generator=generator, device=ends_N.device)
        self.standing_NO = torch.where(ends_N[:, None], fresh_NO * 0.1 - 0.05, self.standing_NO)
        self.num_steps_N = torch.where(ends_N, 0, self.num_steps_N)
        return fails_N, is_over_N


class ActorCritic(nn.Module):
    """Says where to push, two logits, and what is still to come, one number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))
        self.critic = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, standing_NO: Tensor) -> tuple[Tensor, Tensor]:
        return log_softmax(self.actor(standing_NO), 1), self.critic(standing_NO).squeeze(1)


class Ppo:
    """Drives, then learns from the drive in minibatches.

    Args:
        num_carts, num_steps: how many carts drive, and for how long, a batch.
        num_rounds: how often a drive is gone over.
        minibatch_size: steps of an update.
        clip: how far the policy may move from the one that drove.
        discount, trace: of what is to come, and of the advantages' sum.

    Source: Schulman et al. 2017, arXiv:1707.06347, equation 7; the advantages are those of Schulman
    et al. 2016, arXiv:1506.02438, equation 16.
    """

    name = "ppo"
    state_per_rank = True

    def __init__(
        self,
        num_carts: int,
        num_steps: int,
        num_rounds: int = 4,
        minibatch_size: int = 256,
        clip: float = 0.2,
        discount: float = 0.99,
        trace: float = 0.95,
    ) -> None:
        self.carts = Carts(num_carts)
        self.num_steps, self.num_rounds, self.minibatch_size = num_steps, num_rounds, minibatch_size
        self.clip, self.discount, self.trace = clip, discount, trace

    @hookimpl
    def train_batch(self, state: State) -> bool | StepOutcome:
        """Makes an update of each minibatch; the last one says whether the schedulers move."""
        generator = state.generator("ppo")
        drive = self.drive(state, generator)
        stepped: bool | StepOutcome = False
        for _ in range(self.num_rounds):
            order = torch.randperm(len(drive["right"]), generator=generator, device=state.device)
            for chosen in order.split(self.minibatch_size):
                state.batch = {name: one[chosen] for name, one in drive.items()}
                stepped = state.update(self.step_loss)
        return stepped

    def step_loss(self, state: State) -> Tensor:
        """Returns what the policy and the critic cost for a microbatch of steps."""
        step = state.microbatch
        logs_N2, values_N = state.model(step["standing"])
        logs_N = logs_N2.gather(1, step["right"][:, None]).squeeze(1)
        ratio_N, gain_N = (logs_N - step["logs"]).exp(), step["advantages"]
        least_N = torch.min(ratio_N * gain_N, ratio_N.clamp(1 - self.clip, 1 + self.clip) * gain_N)
        entropy = -(logs_N2.exp() * logs_N2).sum(1).mean()
        return -least_N.mean() + 0.5 * mse_loss(values_N, step["returns"]) - 0.01 * entropy

    @torch.no_grad()
    def drive(self, state: State, generator: torch.Generator) -> dict[str, Tensor]:
        """Lets the policy drive; returns its steps, of all carts in a row."""
        carts = self.carts
        if carts.is_new:
            carts.begin(generator)
        rows: list[tuple[Tensor, ...]] = []
        for _ in range(self.num_steps):
            standing_NO = carts.standing_NO
            logs_N2, values_N = state.model(standing_NO)
            right_N = torch.multinomial(logs_N2.exp(), 1, generator=generator).squeeze(1)
            fails_N, is_over_N = carts.push(right_N, generator)
            logs_N = logs_N2.gather(1, right_N[:, None]).squeeze(1)
            rows.append((standing_NO, right_N, logs_N, values_N, fails_N, is_over_N))
        standing, right, logs, values, fails, is_over = map(torch.stack, zip(*rows, strict=True))
        advantages = self.advantages(values, state.model(carts.standing_NO)[1], fails, is_over)
        num_ends = (fails | is_over).sum().clamp(min=1)
        state.log("ppo/steps_balanced", fails.numel() / num_ends, "mean")
        spread = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        found = (standing, right, logs, advantages + values, spread)
        names = ("standing", "right", "logs", "returns", "advantages")
        return {name: one.flatten(0, 1) for name, one in zip(names, found, strict=True)}

    def advantages(
        self, values_TN: Tensor, last_N: Tensor, fails_TN: Tensor, is_over_TN: Tensor
    ) -> Tensor:
        """Returns by how much each step was better than the critic thought; each step earns 1."""
        to_come_N, sum_N, found = last_N, torch.zeros_like(last_N), []
        for t in reversed(range(len(values_TN))):
            # One that was stopped while it balanced would have earned on.
            later_N = torch.where(is_over_TN[t], values_TN[t], to_come_N) * ~fails_TN[t]
            surprise_N = 1.0 + self.discount * later_N - values_TN[t]
            goes_on_N = ~(fails_TN[t] | is_over_TN[t])
            sum_N = surprise_N + self.discount * self.trace * goes_on_N * sum_N
            to_come_N = values_TN[t]
            found.append(sum_N)
        return torch.stack(found[::-1])

    def state_dict(self) -> dict[str, Any]:
        """Returns how the carts stand."""
        return dict(vars(self.carts))

    def load_state_dict(self, state: Mapping[str, Any], version: str) -> None:
        """Lets the carts go on from there."""
        self.carts.standing_NO = state["standing_NO"].clone()
        self.carts.num_steps_N = state["num_steps_N"].clone()
        self.carts.is_new = state["is_new"]


def task(lr: float = 3e-3, num_carts: int = 16, num_steps: int = 64, width: int = 64) -> Task:
    """Says what is trained; each parameter is an option, `--task.lr` and so on.

    Args:
        lr: learning rate at the start; it falls to zero in a straight line.
        num_carts: carts that drive at once.
        num_steps: how long they drive between two times of learning.
        width: of the hidden layers.
    """
    return Task(
        model=lambda: ActorCritic(width),
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr, eps=1e-5),
        scheduler=schedules.linear(),
        num_samples=lambda batch: len(batch["right"]) if batch else num_carts * num_steps,
        algorithms=[Ppo(num_carts, num_steps)],
        settings={"max_duration": "100ba", "clip_norm": 0.5, "log_interval": "5ba"},
    )
