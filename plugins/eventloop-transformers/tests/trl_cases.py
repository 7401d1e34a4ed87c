"""TRL's trainers to compare, each with a tiny model and data of its own kind."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import datasets
import torch
import trl
from hf_cases import USE_CPU, Recorder, files_in, untimed
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

WORDS = [f"w{idx}" for idx in range(60)]
SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def reward_model() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1))


def tokenizer() -> PreTrainedTokenizerFast:
    names = ["<pad>", "<bos>", "<eos>", "<unk>", *WORDS]
    made = Tokenizer(models.WordLevel({one: idx for idx, one in enumerate(names)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
    }
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def texts(num: int, seed: int) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    return [
        " ".join(WORDS[idx] for idx in torch.randint(60, (3 + one % 5,), generator=generator))
        for one in range(num)
    ]


def table(**columns: Any) -> datasets.Dataset:
    return datasets.Dataset.from_dict(columns)


def pairs(num: int) -> datasets.Dataset:
    return table(prompt=texts(num, 1), chosen=texts(num, 2), rejected=texts(num, 3))


def length_reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(set(one.split()))) for one in completions]


TRAINERS: dict[str, Callable[[Any, str, dict[str, Any]], Any]] = {
    "SFT": lambda on, out, more: on(trl.SFTTrainer)(
        model=language_model(), processing_class=tokenizer(),
        args=trl.SFTConfig(**common(out, max_length=32) | more),
        train_dataset=table(text=texts(14, 1)), eval_dataset=table(text=texts(4, 5)),
    ),
    "SFT, packed": lambda on, out, more: on(trl.SFTTrainer)(
        model=language_model(), processing_class=tokenizer(),
        args=trl.SFTConfig(**common(out, max_length=16, packing=True, packing_strategy="wrapped") | more),
        train_dataset=table(text=texts(60, 1)),
    ),
    "DPO": lambda on, out, more: on(trl.DPOTrainer)(
        model=language_model(), ref_model=language_model(), processing_class=tokenizer(),
        args=trl.DPOConfig(**common(out) | more),
        train_dataset=pairs(14), eval_dataset=pairs(4),
    ),
    "Reward": lambda on, out, more: on(trl.RewardTrainer)(
        model=reward_model(), processing_class=tokenizer(), args=trl.RewardConfig(**common(out) | more),
        train_dataset=table(chosen=texts(14, 2), rejected=texts(14, 3)),
    ),
    "GRPO": lambda on, out, more: on(trl.GRPOTrainer)(
        model=language_model(), processing_class=tokenizer(),
        args=trl.GRPOConfig(
            **common(out, num_generations=2, max_completion_length=6, num_iterations=2) | more
        ),
        train_dataset=table(prompt=texts(8, 1)), reward_funcs=length_reward,
    ),
    "RLOO": lambda on, out, more: on(trl.RLOOTrainer)(
        model=language_model(), processing_class=tokenizer(),
        args=trl.RLOOConfig(
            **common(out, num_generations=2, max_completion_length=6, beta=0.0) | more
        ),
        train_dataset=table(prompt=texts(8, 1)), reward_funcs=length_reward,
    ),
    "KTO": lambda on, out, more: on(trl.KTOTrainer)(
        model=language_model(), ref_model=language_model(), processing_class=tokenizer(),
        args=trl.KTOConfig(**common(out) | more),
        train_dataset=table(prompt=texts(14, 1), completion=texts(14, 2), label=[True, False] * 7),
    ),
}  # fmt: skip


def common(out: str, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": out, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2,
        "num_train_epochs": 2, "learning_rate": 1e-2, "logging_steps": 2, "save_strategy": "no",
        "report_to": [], "disable_tqdm": True, "use_cpu": USE_CPU, "bf16": False,
        "gradient_checkpointing": False, **more,
    }  # fmt: skip


def trl_trained(
    name: str, on: Any, out: str, callbacks: tuple[Any, ...] = (), resume: Any = None, **more: Any
) -> dict[str, Any]:
    """Trains, and returns all that there is to compare."""
    trainer = TRAINERS[name](on, out, more)
    recorder = Recorder()
    for one in (*callbacks, recorder):
        trainer.add_callback(one)
    output = trainer.train(resume_from_checkpoint=resume)
    return {
        "weights": {name: one.clone() for name, one in trainer.model.state_dict().items()},
        "optimizer": trainer.optimizer.state_dict(),
        "history": untimed(trainer.state.log_history),
        "state": {k: v for k, v in asdict(trainer.state).items() if k != "log_history"},
        "output": [output.global_step, output.training_loss, untimed([output.metrics])],
        "calls": recorder.calls,
        "files": files_in(Path(out)),
        "random": [float(torch.rand(()))],
    }
