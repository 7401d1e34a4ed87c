"""Supervised fine-tuning: `eventloop fit eventloop_llm.sft --task.model FOLDER --task.data chats.jsonl`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from eventloop import State, Task, TaskError
from eventloop_llm.chats.documents import Documents, batches_of, num_tokens
from eventloop_llm.chats.rows import read_rows
from eventloop_llm.chats.tokens import Conversations, LossOn, examples_of
from eventloop_llm.models.model_task import EVAL, ModelTask, Samples, Schedule, training
from eventloop_llm.models.passes import forward_parameters, model_inputs, token_log_probs
from eventloop_llm.models.pretrained import Dtype, model_maker, tokenizer_of
from eventloop_llm.packing import IGNORED


def task(
    model: str | Callable[[], nn.Module],
    data: str | Path | Sequence[Mapping[str, Any]],
    *,
    eval_data: str | Path | Sequence[Mapping[str, Any]] | None = None,
    tokenizer: Any = None,
    chat_template: Path | None = None,
    loss_on: LossOn = "auto",
    max_length: int = 1024,
    packing: bool = False,
    batch_size: int = 8,
    microbatch_size: int | None = None,
    shuffle: bool = True,
    num_workers: int = 0,
    dtype: Dtype = "float32",
    lr: float = 2e-5,
    weight_decay: float = 0.0,
    schedule: Schedule = "cosine",
    warmup: str | None = "0.03dur",
    num_samples: int = 3,
    max_new_tokens: int = 64,
) -> Task:
    """Returns the task that trains a language model on chats.

    Args:
        model: a folder that `save_pretrained` wrote, or a name on the Hub; in Python also a function
            that returns the model.
        data: a .jsonl or .parquet file, or a folder of datasets; in Python also the rows. A row has
            messages, or prompt and completion, or text, or input_ids and labels.
        eval_data: data to evaluate with, in the same formats.
        tokenizer: folder or name of the tokenizer, if it isn't in the model's folder; in Python also
            the tokenizer.
        chat_template: a file with a template that replaces the tokenizer's.
        loss_on: the tokens to train on. assistant: text of assistants; completion: the completion, or
            the last message; all: all tokens; auto: assistants of messages, the completion of a
            prompt, all of a text.
        max_length: maximum number of tokens in a row; longer rows are truncated at the end.
        packing: whether several rows share a sequence of `max_length` tokens; a batch has `batch_size`
            sequences.
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
    tokenizer = tokenizer_of(model, tokenizer, chat_template)
    conversations = Conversations(tokenizer, loss_on)
    documents, note = _documents(data, conversations, max_length)
    loader = partial(
        batches_of, pad_id=tokenizer.pad_token_id, microbatch_size=microbatch_size,
        num_workers=num_workers,
    )  # fmt: skip
    eval_loaders = None
    prompts = []
    if eval_data is not None:
        eval_documents, eval_note = _documents(eval_data, conversations, max_length)
        note += f"; {EVAL}: {eval_note}"
        eval_loaders = {EVAL: loader(eval_documents, batch_size=batch_size)}
        prompts = _prompts(eval_data, conversations, num_samples, max_length)
    make_model = model_maker(model, dtype)
    if packing:
        make_model = partial(_packable, make_model)
    # Only training rows are packed: the eval loss stays comparable between packed and other runs.
    pack_into = max_length if packing else None
    return ModelTask(
        tokenizer=tokenizer,
        model=make_model,
        forward=forward,
        loss_weight=num_labels,
        num_tokens=num_tokens,
        train_dataloader=loader(
            documents, batch_size=batch_size, pack_into=pack_into, shuffle=shuffle
        ),
        eval_dataloaders=eval_loaders,
        callbacks=[Samples(tokenizer, prompts, max_new_tokens=max_new_tokens, header=note)],
        **training(
            lr=lr, weight_decay=weight_decay, schedule=schedule, warmup=warmup, max_duration="3ep"
        ),
    )


def forward(model: nn.Module, batch: Mapping[str, Tensor], state: State) -> Any:
    """Returns logits, and the mean loss over the labels of a microbatch; 0 if it has no labels."""
    outputs: Any = model(**model_inputs(state.model, batch))
    log_probs, is_counted = token_log_probs(outputs.logits, batch["labels"])
    num = is_counted.sum().clamp(min=1)
    loss = -log_probs.sum() / num
    if state.eval_name is not None:
        is_right = outputs.logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]
        state.log("accuracy", is_right.sum() / num, "mean")
    return {"loss": with_router_loss(loss, outputs, state.model), "logits": outputs.logits}


def with_router_loss(loss: Tensor, outputs: Any, model: nn.Module) -> Tensor:
    """Adds the load-balancing loss of a mixture of experts, if the model's configuration asks for it."""
    aux_loss = getattr(outputs, "aux_loss", None)
    config: Any = model.config
    return loss if aux_loss is None else loss + config.router_aux_loss_coef * aux_loss


def num_labels(batch: Mapping[str, Tensor]) -> Tensor:
    """Returns the number of labels in a microbatch, over which its loss is averaged, shape ()."""
    return (batch["labels"][:, 1:] != IGNORED).sum()


def _packable(make: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """Returns the model if it can keep packed rows apart.

    Raises:
        TaskError: the model's forward has no `position_ids`.
    """
    model = make if isinstance(make, nn.Module) else make()
    if "position_ids" not in forward_parameters(model):
        raise TaskError(
            "packing=True, but the model takes no position_ids: rows that are packed into the same "
            "sequence would see each other",
            model=type(model).__name__,
            fix="leave packing out",
        )
    return model


def _documents(data: Any, conversations: Conversations, max_length: int) -> tuple[Documents, str]:
    """Returns the rows as tokens, and a note on them for the run's header."""
    rows, name = read_rows(data)
    examples, num_cut, num_left_out = examples_of(rows, name, conversations, max_length)
    num_ids = sum(len(example.input_ids) for example in examples)
    num_trained = sum(label != IGNORED for example in examples for label in example.labels[1:])
    note = f"{len(examples):,} rows of {name}, {num_ids:,} tokens, {num_trained:,} trained on"
    note += f"; {num_cut:,} cut to {max_length:,} tokens" if num_cut else ""
    note += f"; {num_left_out:,} left out, without a label" if num_left_out else ""
    return Documents(examples), note


def _prompts(
    data: Any, conversations: Conversations, num: int, max_length: int
) -> list[tuple[list[int], str]]:
    """Returns the token ids and the reference answers of the first prompts that leave room for an answer."""
    rows, _ = read_rows(data)
    prompts: list[tuple[list[int], str]] = []
    for row in rows:
        if len(prompts) == num:
            break
        prompt = conversations.prompt_and_answer(row)
        if prompt is not None and len(prompt[0]) < max_length:
            prompts.append(prompt)
    return prompts
