"""The task: `eventloop fit eventloop_reward --task.model FOLDER --task.data pairs.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eventloop import State, Task
from eventloop_chats.batches import num_tokens
from eventloop_chats.pairs import DOCUMENTS, Pairs, num_rows, pair_batches_of, pairs_of
from eventloop_chats.rows import read_rows
from eventloop_chats.tokens import Conversations, require_some
from eventloop_language_models.models import Dtype, loaded, tokenizer_of
from eventloop_language_models.optimizing import Schedule, adamw, schedule_of
from eventloop_language_models.passes import model_inputs
from eventloop_language_models.samples import ModelTask, Samples
from eventloop_reward.losses import reward_losses

EVAL = "eval"


def task(
    model: str | Callable[[], nn.Module],
    data: str | Path | Sequence[Mapping[str, Any]],
    *,
    eval_data: str | Path | Sequence[Mapping[str, Any]] | None = None,
    tokenizer: Any = None,
    chat_template: Path | None = None,
    center_weight: float = 0.0,
    max_length: int = 1024,
    batch_size: int = 8,
    microbatch_size: int | None = None,
    shuffle: bool = True,
    num_workers: int = 0,
    dtype: Dtype = "float32",
    lr: float = 1e-5,
    weight_decay: float = 0.0,
    schedule: Schedule = "cosine",
    warmup: str | None = "0.03dur",
) -> Task:
    """Returns the task that trains a reward model: a language model whose head is one number.

    Args:
        model: a folder that `save_pretrained` wrote, or a name on the Hub, of a language model, whose
            head is drawn anew, or of a reward model; in Python also a function that returns one.
        data: a .jsonl or .parquet file, or a folder of datasets; in Python also the rows. A row has
            prompt, chosen and rejected, or chosen and rejected as chats that begin alike; and, if
            wanted, margin: by how much the reward of the first should be more.
        eval_data: likewise, to evaluate with.
        tokenizer: where it stands, if not with the model; in Python also the tokenizer.
        chat_template: a file with a template, in the place of the tokenizer's own.
        center_weight: of the square of a pair's sum, which keeps rewards around 0; 0.01, say.
        max_length: tokens of a prompt with an answer; rows with a longer one are left out.
        batch_size: pairs of a batch, on each rank.
        microbatch_size: pairs of a microbatch, which is padded by itself; not set: the whole batch is.
        shuffle: whether each epoch has another order.
        num_workers: processes that make batches.
        dtype: of the weights; auto: as they are saved.
        lr: highest learning rate.
        weight_decay: of AdamW.
        schedule: how the learning rate falls after the warm-up.
        warmup: how long it rises.

    Raises:
        ValueError: `center_weight` is negative or not finite.
    """
    if not 0 <= center_weight < math.inf:
        raise ValueError(f"center_weight={center_weight!r} isn't a finite number of 0 or more")
    found = tokenizer_of(model, tokenizer, chat_template)
    make = model
    if isinstance(make, str):
        make = partial(reward_model, make, dtype=dtype)
    make = partial(_padded_with, found.pad_token_id, make)
    read = partial(_read, Conversations(found, "completion"), max_length)
    train, note = read(data)
    loaders = None
    loader = partial(
        pair_batches_of, pad_id=found.pad_token_id, batch_size=batch_size,
        microbatch_size=microbatch_size, num_workers=num_workers,
    )  # fmt: skip
    if eval_data is not None:
        evals, eval_note = read(eval_data)
        note += f"; {EVAL}: {eval_note}"
        loaders = {EVAL: loader(evals)}
    return ModelTask(
        tokenizer=found,
        model=make,
        forward=partial(forward, center_weight=center_weight),
        loss_weight=num_rows,
        num_samples=num_rows,
        num_tokens=num_tokens,
        train_dataloader=loader(train, shuffle=shuffle),
        eval_dataloaders=loaders,
        optimizer=partial(adamw, lr=lr, weight_decay=weight_decay),
        scheduler=schedule_of(schedule, warmup),
        callbacks=[Samples(found, [], header=note)],
        settings={"max_duration": "1ep", "clip_norm": 1.0},
    )


def reward_model(
    name: str, *, dtype: Dtype = "float32", pad_token_id: int | None = None
) -> nn.Module:
    """Loads a model with one output, of the last token that isn't padding; a new head is drawn.

    Args:
        pad_token_id: what is padding; None: what the model's configuration says.

    Raises:
        TaskError: there is no such model.
    """
    from transformers import AutoModelForSequenceClassification

    model: nn.Module = loaded(AutoModelForSequenceClassification, name, dtype=dtype, num_labels=1)
    return model if pad_token_id is None else _padded_with(pad_token_id, model)


def forward(
    model: nn.Module, batch: Mapping[str, Tensor], state: State, center_weight: float = 0.0
) -> dict[str, Tensor]:
    """Returns the rewards of a microbatch's pairs, shape (B, 2), and its mean loss."""
    flat = {name: batch[name].flatten(0, 1) for name in DOCUMENTS}
    outputs: Any = model(**model_inputs(state.model, flat))
    rewards_BK = outputs.logits.float().view(-1, 2)
    chosen_B, rejected_B = rewards_BK.unbind(1)
    state.log("rewards/chosen", chosen_B.mean(), "mean")
    state.log("rewards/rejected", rejected_B.mean(), "mean")
    state.log("rewards/accuracy", (chosen_B > rejected_B).float().mean(), "mean")
    margin = batch.get("margin", torch.zeros_like(chosen_B))
    loss = reward_losses(chosen_B, rejected_B, margin, center_weight).mean()
    return {"loss": loss, "logits": rewards_BK}


def _padded_with(pad_token_id: int, make: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """Has a model take the tokenizer's padding for such; it would judge an answer at any other."""
    model: Any = make if isinstance(make, nn.Module) else make()
    model.config.get_text_config().pad_token_id = pad_token_id
    return model  # type: ignore[no-any-return]


def _read(conversations: Conversations, max_length: int, data: Any) -> tuple[Pairs, str]:
    """Returns pairs as tokens, and a note on them."""
    rows, name = read_rows(data)
    made = pairs_of(rows, name, conversations)
    short = [
        one for one in made
        if max(len(one.first.input_ids), len(one.second.input_ids)) <= max_length
    ]  # fmt: skip
    require_some(short, name, max_length)
    note = f"{len(short):,} pairs of {name}"
    if len(short) < len(made):
        note += f"; {len(made) - len(short):,} longer than {max_length:,} tokens left out"
    return Pairs(short), note
