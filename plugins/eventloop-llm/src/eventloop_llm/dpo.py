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
from eventloop_llm.models.model_task import EVAL, ModelTask, Samples, Schedule, adamw, schedule_of
from eventloop_llm.models.pretrained import Dtype, model_maker, tokenizer_of
from eventloop_llm.models.references import Chosen, Reference, ReferenceKind
from eventloop_llm.models.stored_reference import Stored
from eventloop_llm.preferences.answers import answers_of, cut_pairs_of
from eventloop_llm.preferences.preference_losses import LOSSES, Loss
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
        reference: companion: a second model; adapters-off: the model without its adapters; auto: the
            latter if there are some. orpo, simpo and cpo need none.
        reference_model: of the companion; not set: the model itself before it is trained.
        store_reference: whether the reference's log-probabilities are computed once, before training,
            into the run's folder, so that no second model stays in memory.
        beta: how far the model may move from the reference, the less the further; not set: 0.1, of
            simpo 2.0.
        gamma: by how much a chosen answer should be ahead; not set: 0, of simpo 1.0.
        label_smoothing: the share of pairs that are assumed to be the wrong way round.
        average: whether log-probabilities are means over the tokens of an answer, or sums; not set: as
            the loss has them.
        nll_weight: of the chosen answer's own loss; not set: 1 of orpo and cpo, else 0.
        nll_on: whether that is over the answer, or over all of its chat.
        desired_weight: kto's weight of the losses of desired answers.
        undesired_weight: kto's weight of the losses of the other answers.
        rotate_in: for kto, each answer is compared with the next other prompt; after so many rows with
            the first of them. Not set: of all.
        eval_data: data to evaluate with, in the same formats.
        tokenizer: its folder or name, if it isn't in the model's folder; in Python also the tokenizer.
        chat_template: a file with a template that replaces the tokenizer's.
        max_length: tokens of a prompt with an answer; longer ones are cut at their end.
        batch_size: rows of a batch, on each rank.
        microbatch_size: rows of a microbatch, padded separately; not set: the batch is one.
        shuffle: whether the order changes in each epoch.
        num_workers: processes that make batches.
        dtype: of the weights; auto: as they are saved.
        lr: highest learning rate.
        weight_decay: of AdamW.
        schedule: how the learning rate falls after the warm-up.
        warmup: how long it rises.
        num_samples: prompts of the eval data that are answered after each evaluation.
        max_new_tokens: of such an answer.
    """
    _require_effects(loss, locals())
    tokenizer = tokenizer_of(model, tokenizer, chat_template)
    conversations = Conversations(tokenizer, "completion")
    read = partial(_read, loss, conversations, max_length, rotate_in)
    train, note = read(data, 0)
    sets = [train]
    prompts = []
    if eval_data is not None:
        evals, eval_note = read(eval_data, len(train))
        sets.append(evals)
        note += f"; {EVAL}: {eval_note}"
        prompts = _prompts(eval_data, conversations, num_samples)
    numbers = {"beta": beta, "gamma": gamma, "is_mean": average, "nll_weight": nll_weight}
    changes: dict[str, Any] = {name: value for name, value in numbers.items() if value is not None}
    options = replace(LOSSES[loss], label_smoothing=label_smoothing, **changes)
    make_model = model_maker(model, dtype)
    compared: Reference | None = None
    if options.has_reference:
        companion = None if reference_model is None else model_maker(reference_model, dtype)
        compared = Chosen(reference, companion, None if store_reference else make_model)
        if store_reference:
            compared = Stored(compared, sets, pad_id=tokenizer.pad_token_id, batch_size=batch_size)
    loader = partial(
        pair_batches_of, pad_id=tokenizer.pad_token_id, batch_size=batch_size,
        microbatch_size=microbatch_size, num_workers=num_workers,
    )  # fmt: skip
    plugin = Preferences(
        loss, options, compared, nll_on=nll_on, desired_weight=desired_weight,
        undesired_weight=undesired_weight,
    )  # fmt: skip
    return ModelTask(
        tokenizer=tokenizer,
        model=make_model,
        loss_weight=num_rows,
        num_samples=num_rows,
        num_tokens=num_tokens,
        train_dataloader=loader(train, shuffle=shuffle),
        eval_dataloaders={EVAL: loader(sets[1])} if sets[1:] else None,
        optimizer=partial(adamw, lr=lr, weight_decay=weight_decay),
        scheduler=schedule_of(schedule, warmup),
        algorithms=[plugin],
        callbacks=[Samples(tokenizer, prompts, max_new_tokens=max_new_tokens, header=note)],
        settings={"max_duration": "1ep", "clip_norm": 1.0},
    )


def _read(
    loss: Loss, conversations: Conversations, max_length: int, rotate_in: int | None, data: Any,
    first_number: int,
) -> tuple[Pairs, str]:  # fmt: skip
    """Returns the rows as tokens, and a note on them."""
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
    rows, _ = read_rows(data)
    answered_rows = [
        row if "completion" in row else chosen_and_rejected(row)[0] for row in rows[:num]
    ]
    prompts = [conversations.prompt_and_answer(row) for row in answered_rows]
    return [prompt for prompt in prompts if prompt is not None]


def _require_effects(loss: Loss, options: Mapping[str, Any]) -> None:
    """Raises a SettingError for an option that the loss doesn't have."""
    pairs: set[Loss] = {"dpo", "ipo", "orpo", "simpo", "cpo"}
    compared: set[Loss] = {"dpo", "ipo", "kto"}
    margins: set[Loss] = {"dpo", "simpo", "cpo"}
    effects: dict[str, set[Loss]] = {
        "reference": compared, "reference_model": compared, "store_reference": compared,
        "gamma": margins, "label_smoothing": margins, "average": pairs, "nll_weight": pairs,
        "nll_on": pairs, "desired_weight": {"kto"}, "undesired_weight": {"kto"},
        "rotate_in": {"kto"},
    }  # fmt: skip
    defaults = inspect.signature(task).parameters
    for name, losses in effects.items():
        if loss not in losses and options[name] != defaults[name].default:
            raise SettingError(
                f"{name} has no effect with loss={loss!r}",
                fix=f"leave it out, or take one of {', '.join(sorted(losses))}",
            )
