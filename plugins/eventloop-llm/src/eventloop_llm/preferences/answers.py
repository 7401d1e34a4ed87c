"""Rows for the losses: truncated pairs, and KTO's answers with mismatched answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eventloop_llm.chats.pairs import Pair, chosen_and_rejected, pairs_of
from eventloop_llm.chats.tokens import (
    Conversations,
    Example,
    has_label,
    made_of_rows,
    require_some,
)
from eventloop_llm.packing import IGNORED


def cut_pairs_of(
    rows: Sequence[Mapping[str, Any]], name: str, conversations: Conversations, max_length: int
) -> list[Pair]:
    """Makes pairs truncated to `max_length`; drops pairs where an answer has no label left.

    Raises:
        TaskError: a row can't be used.
    """
    pairs = []
    for pair in pairs_of(rows, name, conversations):
        chosen = pair.first.cut_to(max_length)
        rejected = pair.second.cut_to(max_length)
        if has_label(chosen) and has_label(rejected):
            pairs.append(Pair(chosen, rejected))
    require_some(pairs, name, max_length)
    return pairs


def answers_of(
    rows: Sequence[Mapping[str, Any]],
    name: str,
    conversations: Conversations,
    max_length: int,
    rotate_in: int | None,
) -> list[Pair]:
    """Makes rows for KTO from prompt, completion and label; a pair makes two rows.

    Each row also has a mismatched answer: the answer of the nearest preceding row with another prompt.
    KTO estimates from it how far the model is from the reference.

    Args:
        rotate_in: number of rows within which mismatched answers are chosen; None for all rows.

    Raises:
        TaskError: a row can't be used.
    """

    def make(row: Mapping[str, Any]) -> list[tuple[Example, bool]]:
        if "label" in row:
            return [(conversations(row), bool(row["label"]))]
        chosen, rejected = chosen_and_rejected(row)
        return [(conversations(chosen), True), (conversations(rejected), False)]

    labelled_examples = [
        (example, is_desired)
        for examples_of_row in made_of_rows(rows, name, make)
        for example, is_desired in examples_of_row
        if has_label(example.cut_to(max_length))
    ]
    require_some(labelled_examples, name, max_length)
    size = rotate_in or len(labelled_examples)
    answers = []
    for start in range(0, len(labelled_examples), size):
        group = labelled_examples[start : start + size]
        previous_examples = _with_another_prompt([example for example, _ in group])
        for (example, is_desired), previous in zip(group, previous_examples, strict=True):
            mismatched = _with_answer_of(previous, example).cut_to(max_length)
            answers.append(Pair(example.cut_to(max_length), mismatched, {"is_desired": is_desired}))
    return answers


def _with_another_prompt(examples: Sequence[Example]) -> list[Example]:
    """Returns for each example the nearest preceding one with another prompt, cyclically; the last if all share one."""
    prompts = [example.input_ids[: _num_prompt(example)] for example in examples]
    position = -1
    for idx, prompt in enumerate(prompts):
        if prompt != prompts[0]:
            position = idx
    previous_examples = []
    for idx, prompt in enumerate(prompts):
        if prompts[idx - 1] != prompt:
            position = idx - 1
        previous_examples.append(examples[position])
    return previous_examples


def _with_answer_of(source: Example, example: Example) -> Example:
    """Returns the prompt of an example with the answer of another."""
    prompt = example.input_ids[: _num_prompt(example)]
    answer = source.input_ids[_num_prompt(source) :]
    return Example(prompt + answer, [IGNORED] * len(prompt) + answer)


def _num_prompt(example: Example) -> int:
    return next(idx for idx, label in enumerate(example.labels) if label != IGNORED)
