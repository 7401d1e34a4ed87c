"""The task: `eventloop fit eventloop_grpo --task.model FOLDER --task.data prompts.jsonl --grpo.num-generations 8`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from eventloop import Task, TaskError
from eventloop.toolbox import as_option
from eventloop_chats.rows import read_rows
from eventloop_chats.tokens import Conversations, made_of_rows
from eventloop_language_models.models import Dtype, model_maker, tokenizer_of
from eventloop_language_models.optimizing import Schedule, adamw, schedule_of
from eventloop_language_models.samples import ModelTask


def task(
    model: str | Callable[[], nn.Module],
    data: str | Path | Sequence[Mapping[str, Any]],
    *,
    tokenizer: Any = None,
    chat_template: Path | None = None,
    batch_size: int = 8,
    shuffle: bool = True,
    dtype: Dtype = "float32",
    lr: float = 1e-6,
    weight_decay: float = 0.0,
    schedule: Schedule = "constant",
    warmup: str | None = None,
) -> Task:
    """Returns the task with prompts for `grpo`, whose options set how completions are judged.

    Args:
        model: a folder that `save_pretrained` wrote, or a name on the Hub; in Python also a function
            that returns the model.
        data: a .jsonl or .parquet file, or a folder of datasets; in Python also the rows. A row has a
            prompt, a text or messages; or messages, up to the last of an assistant. What else it has is
            in the columns of the rollouts.
        tokenizer: where it stands, if not with the model; in Python also the tokenizer.
        chat_template: a file with a template, in the place of the tokenizer's own.
        batch_size: prompts of a batch, on each rank.
        shuffle: whether each epoch has another order.
        dtype: of the weights; auto: as they are saved.
        lr: highest learning rate.
        weight_decay: of AdamW.
        schedule: how the learning rate falls after `warmup`.
    """
    found = tokenizer_of(model, tokenizer, chat_template)
    rows, name = read_rows(data)
    prompts = made_of_rows(rows, name, partial(_prompt, Conversations(found)))
    loader: DataLoader[Any] = DataLoader(
        prompts,  # type: ignore[arg-type]
        batch_size, shuffle=shuffle, collate_fn=partial(_batch, found.pad_token_id),
    )  # fmt: skip
    return ModelTask(
        tokenizer=found,
        model=model_maker(model, dtype),
        forward=_unjudged,
        train_dataloader=loader,
        optimizer=partial(adamw, lr=lr, weight_decay=weight_decay),
        scheduler=schedule_of(schedule, warmup),
        settings={"max_duration": "1ep", "clip_norm": 1.0},
    )


def _unjudged(model: nn.Module, batch: Any) -> NoReturn:
    raise TaskError("the plugin grpo is off", fix="give " + as_option("grpo", num_generations=8))


def _prompt(conversations: Conversations, row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ids of a row's prompt, and what else it has."""
    prompt = row.get("prompt", row.get("messages"))
    if prompt is None:
        raise ValueError(f"it has {', '.join(map(repr, row)) or 'nothing'}; give a prompt")
    if "prompt" not in row and prompt[-1]["role"] == "assistant":
        prompt = prompt[:-1]
    rest = {name: one for name, one in row.items() if name not in ("prompt", "messages")}
    return rest | {"input_ids": conversations.prompt_ids(prompt, row.get("tools"))}


def _batch(pad_id: int, prompts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns prompts padded on the left, and columns of those names that all have."""
    ids = [torch.tensor(one["input_ids"]) for one in prompts]
    pad = partial(pad_sequence, batch_first=True, padding_side="left")
    padded, masks = pad(ids, padding_value=pad_id), pad([torch.ones_like(one) for one in ids])
    names = set.intersection(*map(set, prompts)) - {"input_ids", "attention_mask"}
    columns = {name: [one[name] for one in prompts] for name in sorted(names)}
    return columns | {"input_ids": padded, "attention_mask": masks}
