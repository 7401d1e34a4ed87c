"""A tiny model learns to copy two digits, from nothing but a reward for what is right.

    python copy_digits.py          one run
    python copy_digits.py 5        five seeds: the mean reward and its interval of 95 %

A reward of 1.0 is both digits and the end. `eventloop fit copy_digits.py` trains, too.
"""

from __future__ import annotations

import math
import statistics
import sys

import torch
from torch.utils.data import DataLoader

from eventloop import Task, Trainer, hookimpl
from eventloop_llm.grpo import Grpo
from eventloop_llm.rollouts.completions import Rollouts

PAD, END, EQUALS, ZERO = 0, 1, 2, 3
NUM_DIGITS = 2


def model() -> torch.nn.Module:
    """Returns a Llama of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=13, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, initializer_range=0.1,
            pad_token_id=PAD, eos_token_id=END, bos_token_id=EQUALS,
        )
    )  # fmt: skip


def prompts() -> list[dict[str, torch.Tensor]]:
    """All pairs of digits, each followed by the sign of equality."""
    digits = torch.cartesian_prod(*[torch.arange(10)] * NUM_DIGITS)
    return [
        {"input_ids": torch.cat([one + ZERO, torch.tensor([EQUALS])]), "answer": one + ZERO}
        for one in digits
    ]


def reward(rollouts: Rollouts) -> torch.Tensor:
    """Returns the share of the digits, and the end, that are right."""
    answers = torch.stack([*rollouts.columns["answer"]])
    wanted = torch.nn.functional.pad(answers, (0, 1), value=END)
    tokens = rollouts.completion_ids
    tokens = torch.nn.functional.pad(tokens, (0, wanted.shape[1] - tokens.shape[1]), value=PAD)
    return (tokens == wanted).float().mean(1)


def task(lr: float = 2e-3, batch_size: int = 20, num_generations: int = 8) -> Task:
    """Returns the task, with the plugin."""
    grpo = Grpo(
        num_generations=num_generations,
        reward=reward,
        max_tokens=NUM_DIGITS + 1,
        num_iterations=2,
        log_rollouts="100ba",
    )
    return Task(
        model=model,
        train_dataloader=lambda: DataLoader(prompts(), batch_size, shuffle=True),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0),
        algorithms=[grpo],
        settings={"max_duration": "250ba", "clip_norm": 1.0, "log_interval": "50ba"},
    )


class Rewards:
    """Keeps the mean reward of each batch."""

    name = "rewards"

    def __init__(self) -> None:
        self.means: list[float] = []

    @hookimpl
    def log(self, state, numbers, at) -> None:
        """Keeps the mean reward."""
        if "grpo/reward" in numbers:
            self.means.append(float(numbers["grpo/reward"]))


def trained(seed: int, num_batches: int = 250) -> list[float]:
    """Trains once; returns the mean reward of each batch."""
    rewards, given = Rewards(), {"max_duration": f"{num_batches}ba", "seed": seed}
    with Trainer(task(), callbacks=[rewards], autoload=False, **given) as trainer:
        trainer.fit()
    return rewards.means


if __name__ == "__main__":
    runs = [trained(seed) for seed in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1)]
    for name, part in (("first", slice(10)), ("last", slice(-10, None))):
        means = [statistics.mean(one[part]) for one in runs]
        spread = 1.96 * statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0
        print(f"reward of the {name} ten batches: {statistics.mean(means):.3f} +- {spread:.3f}")
