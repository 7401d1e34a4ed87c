"""A reward model: `eventloop fit eventloop_llm.reward --task.model FOLDER --task.data pairs.jsonl`."""

# B = pair of a batch, K = answer of a pair

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from eventloop import State, Task
from eventloop_llm.chats.documents import num_tokens
from eventloop_llm.chats.pairs import DOCUMENTS, Pairs, num_rows, pair_batches_of, pairs_of
from eventloop_llm.chats.rows import read_rows
from eventloop_llm.chats.tokens import Conversations, require_some
from eventloop_llm.models.model_task import EVAL, ModelTask, Samples, Schedule, training
from eventloop_llm.models.passes import model_inputs
from eventloop_llm.models.pretrained import Dtype, loaded, tokenizer_of


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
    """Returns the task that trains a reward model: a language model with a single output.

    Args:
        model: a folder that `save_pretrained` wrote, or a name on the Hub: a language model, which
            gets a new head, or a reward model; in Python also a function that returns the model.
        data: a .jsonl or .parquet file, or a folder of datasets; in Python also the rows. A row has
            prompt, chosen and rejected, or chosen and rejected as chats that begin alike; and
            optionally margin: the minimal difference of their rewards.
        eval_data: data to evaluate with, in the same formats.
        tokenizer: folder or name of the tokenizer, if it isn't in the model's folder; in Python also
            the tokenizer.
        chat_template: a file with a template that replaces the tokenizer's.
        center_weight: weight of the squared sum of a pair's rewards, which keeps them around 0; for
            example 0.01.
        max_length: maximum number of tokens in a prompt with its answer; pairs with a longer answer
            are left out.
        batch_size: number of pairs in a batch, on each rank.
        microbatch_size: number of pairs in a microbatch, each microbatch padded separately; not set:
            the whole batch.
        shuffle: whether to reshuffle the rows in each epoch.
        num_workers: number of processes that load data.
        dtype: dtype of the weights; auto: as saved.
        lr: highest learning rate.
        weight_decay: weight decay of AdamW.
        schedule: how the learning rate falls after the warmup.
        warmup: how long the learning rate rises.

    Raises:
        ValueError: `center_weight` is negative or not finite.
    """
    if not 0 <= center_weight < math.inf:
        raise ValueError(f"center_weight={center_weight!r} isn't a finite number of 0 or more")
    tokenizer = tokenizer_of(model, tokenizer, chat_template)
    if isinstance(model, str):
        model = partial(reward_model, model, dtype=dtype)
    read = partial(_read, Conversations(tokenizer, "completion"), max_length)
    train_pairs, note = read(data)
    eval_loaders = None
    loader = partial(
        pair_batches_of, pad_id=tokenizer.pad_token_id, batch_size=batch_size,
        microbatch_size=microbatch_size, num_workers=num_workers,
    )  # fmt: skip
    if eval_data is not None:
        eval_pairs, eval_note = read(eval_data)
        note += f"; {EVAL}: {eval_note}"
        eval_loaders = {EVAL: loader(eval_pairs)}
    return ModelTask(
        tokenizer=tokenizer,
        model=partial(_padded_with, tokenizer.pad_token_id, model),
        forward=partial(forward, center_weight=center_weight),
        loss_weight=num_rows,
        num_samples=num_rows,
        num_tokens=num_tokens,
        train_dataloader=loader(train_pairs, shuffle=shuffle),
        eval_dataloaders=eval_loaders,
        callbacks=[Samples(tokenizer, [], header=note)],
        **training(
            lr=lr, weight_decay=weight_decay, schedule=schedule, warmup=warmup, max_duration="1ep"
        ),
    )


def reward_model(
    name: str, *, dtype: Dtype = "float32", pad_token_id: int | None = None
) -> nn.Module:
    """Loads a model with a single output, read at the last token that isn't padding.

    A language model gets a new head, initialized at random.

    Args:
        pad_token_id: id of the padding token; None for the model's configured id.

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


def reward_losses(
    chosen_B: Tensor, rejected_B: Tensor, margin_B: Tensor | float = 0.0, center_weight: float = 0.0
) -> Tensor:
    """Returns the loss of each pair, shape (B,).

    Args:
        chosen_B: rewards of the chosen answers.
        rejected_B: rewards of the rejected answers.
        margin_B: difference that the rewards of a pair should have at least.
        center_weight: weight of the squared sum of a pair's rewards, which keeps them around 0.

    Source: Bradley & Terry 1952; Ouyang et al. 2022, arXiv:2203.02155, equation 1. The margin: Touvron et
    al. 2023, arXiv:2307.09288, equation 2; centering: Eisenstein et al. 2023, arXiv:2312.09244, equation 2.
    """
    losses_B = -logsigmoid(chosen_B - rejected_B - margin_B)
    return losses_B + center_weight * (chosen_B + rejected_B) ** 2


def _padded_with(pad_token_id: int, make: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """Sets the model's padding token to the tokenizer's; otherwise it would score padding as the last token."""
    model: Any = make if isinstance(make, nn.Module) else make()
    model.config.get_text_config().pad_token_id = pad_token_id
    return model  # type: ignore[no-any-return]


def _read(conversations: Conversations, max_length: int, data: Any) -> tuple[Pairs, str]:
    """Returns the pairs as tokens, and a note on them for the run's header."""
    rows, name = read_rows(data)
    pairs = pairs_of(rows, name, conversations)
    short_pairs = []
    for pair in pairs:
        length = max(len(pair.first.input_ids), len(pair.second.input_ids))
        if length <= max_length:
            short_pairs.append(pair)
    require_some(short_pairs, name, max_length)
    note = f"{len(short_pairs):,} pairs of {name}"
    if len(short_pairs) < len(pairs):
        note += f"; {len(pairs) - len(short_pairs):,} longer than {max_length:,} tokens left out"
    return Pairs(short_pairs), note
