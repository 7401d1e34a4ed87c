"""Prompts of the task's data, and the completions that a model made of them; free of hooks."""

# B = prompt, N = completion, P = position of a prompt, T = position of a completion

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

IDS = "input_ids"
MASK = "attention_mask"


@dataclass
class Rollouts:
    """Completions of prompts; the completions of the same prompt are adjacent.

    Args:
        prompt_ids, prompt_mask: shape (N, P), padded on the left.
        completion_ids: shape (N, T), padded on the right.
        completion_mask: shape (N, T), float: 1 where a token belongs to the completion.
        columns: further entries of the batch, such as reference answers, repeated for each completion.
        prompts, completions: the decoded texts.
        is_ended: shape (N,), bool: whether a completion ended with an end-of-sequence token.
        logps: shape (N, T), float: log-probabilities under the policy that drew the tokens; None if the
            rollout doesn't report them, then the model computes them.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    prompts: Sequence[str] = ()
    completions: Sequence[str] = ()
    is_ended: Tensor | None = None
    logps: Tensor | None = None

    def __len__(self) -> int:
        return len(self.completion_ids)

    def to(self, device: torch.device) -> Rollouts:
        """Moves the tensors to a device, but not the columns; returns itself."""
        for field_ in fields(self):
            value = getattr(self, field_.name)
            if isinstance(value, Tensor):
                setattr(self, field_.name, value.to(device))
        return self


def prompts_of(batch: Any, num_generations: int) -> Rollouts:
    """Returns the prompts of a batch, each repeated once per completion, without completions.

    Args:
        batch: a mapping with `input_ids` (B, P), and `attention_mask` if prompts are padded, on the left.
            Other entries with B rows become columns.

    Raises:
        ValueError: the batch has no prompts.
    """
    if not isinstance(batch, Mapping) or not isinstance(batch.get(IDS), Tensor):
        kind = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(f"a batch of prompts is a mapping with {IDS!r}, shape (B, P), not {kind}")
    ids_BP = batch[IDS]
    if isinstance(batch.get("labels"), Tensor) and batch["labels"].shape == ids_BP.shape:
        raise ValueError("a batch of prompts has no labels: this is one of another method")
    mask_BP = batch.get(MASK, torch.ones_like(ids_BP))
    if ids_BP.ndim != 2 or mask_BP.shape != ids_BP.shape:
        shapes = tuple(ids_BP.shape), tuple(mask_BP.shape)
        raise ValueError(f"{IDS!r} and {MASK!r} have the shapes {shapes}, not (B, P)")
    if not bool(mask_BP[:, -1].all()):
        raise ValueError("prompts are padded on the right; pad them on the left")
    columns = {}
    for name, value in batch.items():
        if name not in (IDS, MASK) and _has_rows(value, len(ids_BP)):
            columns[name] = [entry for entry in value for _ in range(num_generations)]
    empty = ids_BP.new_empty((len(ids_BP) * num_generations, 0))
    return Rollouts(
        ids_BP.repeat_interleave(num_generations, 0),
        mask_BP.repeat_interleave(num_generations, 0),
        empty,
        empty.float(),
        columns,
    )


def _has_rows(value: Any, num: int) -> bool:
    """Whether a value of a batch has an entry for each prompt."""
    if isinstance(value, Tensor) and value.ndim == 0:
        return False
    return isinstance(value, Tensor | list | tuple) and len(value) == num


def texts_of(tokens: Tensor, mask: Tensor, tokenizer: Any) -> list[str]:
    """Decodes sequences; without a tokenizer returns the token ids as text."""
    rows = [
        [token for token, is_real in zip(ids, real, strict=True) if is_real]
        for ids, real in zip(tokens.tolist(), mask.tolist(), strict=True)
    ]
    if tokenizer is None:
        return [" ".join(map(str, row)) for row in rows]
    texts: list[str] = tokenizer.batch_decode(rows, skip_special_tokens=True)
    return texts


def minibatch(rows: Mapping[str, Tensor], chosen: Tensor) -> dict[str, Tensor]:
    """Returns the chosen rows of every tensor."""
    return {name: tensor[chosen] for name, tensor in rows.items()}
