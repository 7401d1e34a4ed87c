"""What the tests share: pairs, trainings of them, and TRL's."""

from __future__ import annotations

from typing import Any

from run_cases import trained_by_trl
from sft_cases import Losses, llama, sgd, text, tokenizer, weights, with_adapters
from sft_pairs import CHATS, NUM_ROWS, PAIRS

import eventloop_llm.dpo
from eventloop import Task
from eventloop_testing import isolated_trainer

ANSWERS = [
    {"prompt": text(seed) + " ", "completion": text(seed + 50), "label": seed % 3 != 0}
    for seed in range(NUM_ROWS)
]


def other() -> Any:
    """A reference that isn't the model: else the first step would show nothing of it."""
    model = llama()
    for seed, one in enumerate(model.parameters()):
        generator = one.new_tensor(seed)
        one.data += 0.02 * (generator + one.data * 97).sin()
    return model


def dpo_task(rows: Any = PAIRS, model: Any = llama, **options: Any) -> Task:
    """The task with an optimizer whose steps are as large as gradients are."""
    options = {"tokenizer": tokenizer(), "max_length": 48, "batch_size": 6, "lr": 0.1} | options
    made = eventloop_llm.dpo.task(model, rows, warmup=None, **options)
    made.optimizer = sgd
    return made


def trained(
    folder: Any, *plugins: Any, settings: Any = None, change: Any = None, **options: Any
) -> Any:
    """Trains; returns the weights, and the loss of each batch."""
    made, losses = dpo_task(**options), Losses()
    if change is not None:
        change(made)
    given = {"max_duration": "2ep", "clip_norm": 1.0} | (settings or {})
    given["callbacks"] = [losses, *given.get("callbacks", ())]
    with isolated_trainer(folder, made, algorithms=plugins, **given) as trainer:
        trainer.fit()
        return weights(trainer.state.model), losses.found


def theirs(trainer: str, rows: Any, model: Any = llama, ref: Any = None, **options: Any) -> Any:
    """Trains with one of TRL's trainers; returns the weights, and the loss of each step."""
    import trl
    from trl.experimental import cpo, orpo

    kinds = {
        "DPO": (trl.DPOTrainer, trl.DPOConfig), "KTO": (trl.KTOTrainer, trl.KTOConfig),
        "CPO": (cpo.CPOTrainer, cpo.CPOConfig), "ORPO": (orpo.ORPOTrainer, orpo.ORPOConfig),
    }  # fmt: skip
    ref_model = None if ref is None else ref()
    return trained_by_trl(
        *kinds[trainer], rows, model(), tokenizer(), ref_model=ref_model, **options
    )


def new_adapters() -> Any:
    """A model with adapters that add nothing yet."""
    return with_adapters(are_trained=False)


__all__ = [
    "ANSWERS",
    "CHATS",
    "PAIRS",
    "dpo_task",
    "llama",
    "new_adapters",
    "other",
    "theirs",
    "trained",
    "with_adapters",
]
