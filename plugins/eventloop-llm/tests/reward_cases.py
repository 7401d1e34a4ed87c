"""What the tests share: a tiny reward model, and trainings of it, TRL's too."""

from __future__ import annotations

from typing import Any

import torch
from run_cases import trained_by_trl
from sft_cases import SIZES, TARGETS, Losses, sgd, tokenizer, weights
from sft_pairs import CHATS, NUM_ROWS, PAIRS
from torch import nn

import eventloop_llm.reward
from eventloop import Task
from eventloop_testing import isolated_trainer

MARGINS = [row | {"margin": 0.1 * (at % 4)} for at, row in enumerate(PAIRS)]


def llama(**changes: Any) -> nn.Module:
    """The same weights each time, without advancing the global generator."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    state = torch.get_rng_state()
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(**SIZES | {"num_labels": 1} | changes))
    torch.set_rng_state(state)
    return model


def with_adapters() -> nn.Module:
    """The same model with adapters of peft that add something, and its head trained whole."""
    import peft

    state = torch.get_rng_state()
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=2, target_modules=TARGETS, task_type="SEQ_CLS", modules_to_save=["score"],
        init_lora_weights=False,
    )  # fmt: skip
    model = peft.get_peft_model(llama(), config)
    torch.set_rng_state(state)
    return model


def reward_task(rows: Any = PAIRS, model: Any = llama, **options: Any) -> Task:
    """The task with an optimizer whose steps are as large as gradients are."""
    options = {"tokenizer": tokenizer(), "max_length": 48, "batch_size": 6, "lr": 0.1} | options
    made = eventloop_llm.reward.task(model, rows, warmup=None, **options)
    made.optimizer = sgd
    return made


def trained(folder: Any, *plugins: Any, settings: Any = None, **options: Any) -> Any:
    """Trains; returns the weights, and the loss of each batch."""
    losses = Losses()
    given = {"max_duration": "2ep", "clip_norm": 1.0} | (settings or {})
    given["callbacks"] = [losses, *given.get("callbacks", ())]
    task = reward_task(**options)
    with isolated_trainer(folder, task, algorithms=plugins, **given) as trainer:
        trainer.fit()
        return weights(trainer.state.model), losses.found


def theirs(rows: Any, model: Any = llama, **options: Any) -> Any:
    """Trains with TRL's RewardTrainer; returns the weights, and the loss of each step."""
    import trl

    return trained_by_trl(
        trl.RewardTrainer, trl.RewardConfig, rows, model(), tokenizer(), **options
    )


__all__ = ["CHATS", "MARGINS", "NUM_ROWS", "PAIRS", "llama", "reward_task", "theirs", "trained"]
