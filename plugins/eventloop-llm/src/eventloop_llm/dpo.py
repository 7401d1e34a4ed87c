"""Learning from preferences: `eventloop fit eventloop_llm.dpo --task.model FOLDER --task.data pairs.jsonl --task.loss dpo`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from eventloop import SettingError, Task
from eventloop_llm.chats.documents import num_tokens
from eventloop_llm.chats.pairs import Pairs, chosen_and_rejected, num_rows, pair_batches_of
from eventloop_llm.chats.rows import read_rows
from eventloop_llm.chats.tokens import Conversations
from eventloop_llm.models.model_task import EVAL, ModelTask, Samples, Schedule, training
from eventloop_llm.models.pretrained import Dtype, model_maker, tokenizer_of
from eventloop_llm.models.references import Chosen, Reference, ReferenceKind
from eventloop_llm.models.stored_reference import Stored
from eventloop_llm.preferences.answers import answers_of, cut_pairs_of
from eventloop_llm.preferences.preference_losses import LOSSES, Loss, LossOptions
from eventloop_llm.preferences.preference_plugin import NllOn, Preferences


def task(
    model: str | Callable[[], nn.Module],
    data: str | Path | Sequence[Mapping[str, Any]],
    *,
    loss: Loss = "dpo",
    reference: ReferenceKind = "auto",
    reference_model: str | Callable[[], nn.Module] | None = None,
    store_reference: bool = False,
    beta: float | None = None,
    gamma: float | None = None,
    label_smoothing: float = 0.0,
    average: bool | None = None,
    nll_weight: float | None = None,
    nll_on: NllOn = "answer",
    desired_weight: float = 1.0,
    undesired_weight: float = 1.0,
    rotate_in: int | None = None,
    eval_data: str | Path | Sequence[Mapping[str, Any]] | None = None,
    tokenizer: Any = None,
    chat_template: Path | None = None,
    max_length: int = 1024,
    batch_size: int = 8,
    microbatch_size: int | None = None,
    shuffle: bool = True,
    num_workers: int = 0,
    dtype: Dtype = "float32",
    lr: float = 1e-6,
    weight_decay: float = 0.0,
    schedule: Schedule = "cosine",
    warmup: str | None = "0.1dur",
    num_samples: int = 3,
    max_new_tokens: int = 64,
) -> Task:
    """Returns the task that trains a language model on preferences.

    Args:
        model: a folder that `save_pretrained` wrote, or a name on the Hub; in Python also a function
            that returns the model.
        data: a .jsonl or .parquet file, or a folder of datasets; in Python also the rows. A row has
            prompt, chosen and rejected, or chosen and rejected as chats that begin alike; for kto also
            prompt, completion and label, a bool.
        loss: dpo, ipo, kto, orpo, simpo or cpo.
        reference: companion: a second model; adapters-off: the model without its adapters; auto:
            adapters-off if the model has adapters, else companion. orpo, simpo and cpo need none.
        reference_model: the companion; not set: the model before training.
        store_reference: whether the reference's log-probabilities are computed once, before training,
            into the run's folder, so that no second model stays in memory.
        beta: how strongly the model is held to the reference; not set: 0.1, for simpo 2.0.
        gamma: margin by which a chosen answer should lead; not set: 0, for simpo 1.0.
        label_smoothing: assumed share of pairs whose preference is the wrong way round.
        average: whether an answer's log-probability is a mean over its tokens, not a sum; not set: as
            the loss defines it.
        nll_weight: weight of the chosen answer's language modeling loss; not set: 1 for orpo and cpo,
            else 0.
        nll_on: whether that loss covers the answer, or all of the chat.
        desired_weight: weight of desired answers in the kto loss.
        undesired_weight: weight of undesired answers in the kto loss.
        rotate_in: kto compares each answer with that of another prompt, chosen within groups of this
            many rows; not set: a single group.
        eval_data: data to evaluate with, in the same formats.
        tokenizer: folder or name of the tokenizer, if it isn't in the model's folder; in Python also
            the tokenizer.
        chat_template: a file with a template that replaces the tokenizer's.
        max_length: maximum number of tokens in a prompt with its answer; longer rows are truncated at
            the end.
        batch_size: number of rows in a batch, on each rank.
        microbatch_size: number of rows in a microbatch, each microbatch padded separately; not set:
            the whole batch.
        shuffle: whether to reshuffle the rows in each epoch.
        num_workers: number of processes that load data.
        dtype: dtype of the weights; auto: as saved.
        lr: highest learning rate.
        weight_decay: weight decay of AdamW.
        schedule: how the learning rate falls after the warmup.
        warmup: how long the learning rate rises.
        num_samples: number of eval prompts to answer after each evaluation.
        max_new_tokens: maximum number of tokens in such an answer.
    """
    _require_effects(loss, locals())
    tokenizer = tokenizer_of(model, tokenizer, chat_template)
    conversations = Conversations(tokenizer, "completion")
    read = partial(_read, loss, conversations, max_length, rotate_in)
    train_pairs, note = read(data, 0)
    datasets = [train_pairs]
    prompts = []
    if eval_data is not None:
        # Row numbers continue in the eval set: a stored reference looks both up in the same table.
        eval_pairs, eval_note = read(eval_data, len(train_pairs))
        datasets.append(eval_pairs)
        note += f"; {EVAL}: {eval_note}"
        prompts = _prompts(eval_data, conversations, num_samples)
    options = _loss_options(
        loss, label_smoothing, beta=beta, gamma=gamma, is_mean=average, nll_weight=nll_weight
    )
    make_model = model_maker(model, dtype)
    reference_to_use: Reference | None = None
    if options.has_reference:
        make_companion = None if reference_model is None else model_maker(reference_model, dtype)
        # A stored reference is computed before training, by the model itself: no second model is made.
        make_copy = None if store_reference else make_model
        reference_to_use = Chosen(reference, make_companion, make_copy)
        if store_reference:
            reference_to_use = Stored(
                reference_to_use, datasets, pad_id=tokenizer.pad_token_id, batch_size=batch_size
            )
    loader = partial(
        pair_batches_of, pad_id=tokenizer.pad_token_id, batch_size=batch_size,
        microbatch_size=microbatch_size, num_workers=num_workers,
    )  # fmt: skip
    plugin = Preferences(
        loss, options, reference_to_use, nll_on=nll_on, desired_weight=desired_weight,
        undesired_weight=undesired_weight,
    )  # fmt: skip
    return ModelTask(
        tokenizer=tokenizer,
        model=make_model,
        loss_weight=num_rows,
        num_samples=num_rows,
        num_tokens=num_tokens,
        train_dataloader=loader(train_pairs, shuffle=shuffle),
        eval_dataloaders=None if eval_data is None else {EVAL: loader(eval_pairs)},
        algorithms=[plugin],
        callbacks=[Samples(tokenizer, prompts, max_new_tokens=max_new_tokens, header=note)],
        **training(
            lr=lr, weight_decay=weight_decay, schedule=schedule, warmup=warmup, max_duration="1ep"
        ),
    )


def _loss_options(loss: Loss, label_smoothing: float, **numbers: float | None) -> LossOptions:
    """Returns the options of a loss; a number that is None keeps the loss's default."""
    changes: dict[str, Any] = {name: value for name, value in numbers.items() if value is not None}
    return replace(LOSSES[loss], label_smoothing=label_smoothing, **changes)


def _read(
    loss: Loss, conversations: Conversations, max_length: int, rotate_in: int | None, data: Any,
    first_number: int,
) -> tuple[Pairs, str]:  # fmt: skip
    """Returns the rows as tokens, and a note on them for the run's header."""
    rows, name = read_rows(data)
    if loss == "kto":
        answers = answers_of(rows, name, conversations, max_length, rotate_in)
        num_desired = sum(answer.numbers["is_desired"] for answer in answers)
        note = f"{len(answers):,} answers of {name}, {num_desired:,.0f} desired"
        return Pairs(answers, first_number), note
    pairs = cut_pairs_of(rows, name, conversations, max_length)
    note = f"{len(pairs):,} pairs of {name}"
    if len(pairs) < len(rows):
        note += f"; {len(rows) - len(pairs):,} left out, without an answer in {max_length:,} tokens"
    return Pairs(pairs, first_number), note


def _prompts(data: Any, conversations: Conversations, num: int) -> list[tuple[list[int], str]]:
    """Returns the token ids and the reference answers of the first prompts."""
    rows, _ = read_rows(data)
    answered_rows = [
        row if "completion" in row else chosen_and_rejected(row)[0] for row in rows[:num]
    ]
    prompts = [conversations.prompt_and_answer(row) for row in answered_rows]
    return [prompt for prompt in prompts if prompt is not None]


def _require_effects(loss: Loss, options: Mapping[str, Any]) -> None:
    """Raises a SettingError for an option that this loss ignores."""
    losses_of_pairs: set[Loss] = {"dpo", "ipo", "orpo", "simpo", "cpo"}
    losses_with_reference: set[Loss] = {"dpo", "ipo", "kto"}
    losses_with_margin: set[Loss] = {"dpo", "simpo", "cpo"}
    effects: dict[str, set[Loss]] = {
        "reference": losses_with_reference,
        "reference_model": losses_with_reference,
        "store_reference": losses_with_reference,
        "gamma": losses_with_margin,
        "label_smoothing": losses_with_margin,
        "average": losses_of_pairs,
        "nll_weight": losses_of_pairs,
        "nll_on": losses_of_pairs,
        "desired_weight": {"kto"},
        "undesired_weight": {"kto"},
        "rotate_in": {"kto"},
    }
    defaults = inspect.signature(task).parameters
    for name, losses in effects.items():
        if loss not in losses and options[name] != defaults[name].default:
            raise SettingError(
                f"{name} has no effect with loss={loss!r}",
                fix=f"leave it out, or take one of {', '.join(sorted(losses))}",
            )
