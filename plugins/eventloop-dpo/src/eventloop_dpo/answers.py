"""Rows for the losses: pairs that are cut, and KTO's answers with those to other prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eventloop_chats.pairs import Pair, chosen_and_rejected, pairs_of
from eventloop_chats.tokens import (
    IGNORED,
    Conversations,
    Example,
    has_label,
    made_of_rows,
    require_some,
)


def cut_pairs_of(
    rows: Sequence[Mapping[str, Any]], name: str, conversations: Conversations, max_length: int
) -> list[Pair]:
    """Makes pairs, cut to `max_length`; one without a label in an answer is left out.

    Raises:
        TaskError: a row can't be used.
    """
    found = pairs_of(rows, name, conversations)
    cut = [Pair(one.first.cut_to(max_length), one.second.cut_to(max_length)) for one in found]
    made = [one for one in cut if has_label(one.first) and has_label(one.second)]
    require_some(made, name, max_length)
    return made


def answers_of(
    rows: Sequence[Mapping[str, Any]],
    name: str,
    conversations: Conversations,
    max_length: int,
    rotate_in: int | None,
) -> list[Pair]:
    """Makes rows for KTO of prompt, completion and label; of a pair, two of them.

    Each row has an answer to another prompt beside its own: that of the nearest row before.

    Args:
        rotate_in: rows of data within which answers go around; None for all.

    Raises:
        TaskError: a row can't be used.
    """

    def make(row: Mapping[str, Any]) -> list[tuple[Example, bool]]:
        if "label" in row:
            return [(conversations(row), bool(row["label"]))]
        chosen, rejected = chosen_and_rejected(row)
        return [(conversations(chosen), True), (conversations(rejected), False)]

    made = [one for found in made_of_rows(rows, name, make) for one in found]
    made = [one for one in made if has_label(one[0].cut_to(max_length))]
    require_some(made, name, max_length)
    size = rotate_in or len(made)
    answers = []
    for start in range(0, len(made), size):
        group = made[start : start + size]
        others = _before([own for own, _ in group])
        for (own, is_desired), before in zip(group, others, strict=True):
            other = _with_answer(own, before)
            numbers = {"is_desired": is_desired}
            answers.append(Pair(own.cut_to(max_length), other.cut_to(max_length), numbers))
    return answers


def _before(examples: Sequence[Example]) -> list[Example]:
    """Returns the nearest example before each that has another prompt, going around; the last if none has."""
    prompts = [one.input_ids[: _num_prompt(one)] for one in examples]
    at = next((at for at in reversed(range(len(prompts))) if prompts[at] != prompts[0]), -1)
    found = []
    for idx, prompt in enumerate(prompts):
        if prompts[idx - 1] != prompt:
            at = idx - 1
        found.append(examples[at])
    return found


def _with_answer(own: Example, other: Example) -> Example:
    """Returns the prompt of one example with the answer of another."""
    prompt = own.input_ids[: _num_prompt(own)]
    answer = other.input_ids[_num_prompt(other) :]
    return Example(prompt + answer, [IGNORED] * len(prompt) + answer)


def _num_prompt(example: Example) -> int:
    return next(at for at, one in enumerate(example.labels) if one != IGNORED)
