"""A language model learns to answer in one short sentence, which a function can verify.

It goes on with the model that the example `chats.py` leaves, and asks its questions:

eventloop fit plugins/eventloop-llm/examples/chats.py --export chats/tuned/
eventloop fit plugins/eventloop-llm/examples/short_answers.py --task.model chats/tuned
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from eventloop import Task
from eventloop_llm.grpo import Grpo
from eventloop_llm.rollouts.completions import Rollouts

MOST_WORDS = 6


def short(rollouts: Rollouts) -> torch.Tensor:
    """Returns 1.0 for one sentence of few words, 0.5 for either alone, of each completion."""
    points = [
        0.5 * text.strip().endswith(".") + 0.5 * (len(text.split()) <= MOST_WORDS)
        for text in rollouts.completions
    ]
    return torch.tensor(points)


def task(
    model: Path,
    folder: Path = Path("chats"),
    lr: float = 3e-4,
    num_generations: int = 8,
    num_prompts: int = 256,
) -> Task:
    """Says what is trained.

    Args:
        model: a folder with the model.
        folder: has the tokenizer and the questions.
        lr: learning rate.
        num_generations: completions of a question.
        num_prompts: how many questions are asked.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    lines = (folder / "chats.jsonl").read_text(encoding="utf-8").splitlines()[:num_prompts]
    questions = [
        tokenizer.apply_chat_template(
            json.loads(line)["messages"][:1], tokenize=False, add_generation_prompt=True
        )
        for line in lines
    ]

    def batch_of(texts: list[str]) -> dict[str, torch.Tensor]:
        return dict(
            tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
        )

    grpo = Grpo(
        num_generations=num_generations, reward=short, tokenizer=tokenizer, max_tokens=24, temperature=0.7, beta=0.04,
        num_iterations=2, log_rollouts="20ba",
    )  # fmt: skip
    return Task(
        model=lambda: AutoModelForCausalLM.from_pretrained(model),
        train_dataloader=lambda: DataLoader(questions, 8, shuffle=True, collate_fn=batch_of),
        optimizer=lambda net: torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.0),
        algorithms=[grpo],
        settings={"max_duration": "60ba", "clip_norm": 1.0, "log_interval": "10ba"},
    )
