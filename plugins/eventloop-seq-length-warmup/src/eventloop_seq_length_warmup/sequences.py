"""The maths of the warm-up: how long sequences are, and how they become so.

Source: Li et al. 2021, "The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup for
Training GPT Models", arXiv:2108.06084, section 4.
"""

# B = batch, T = position in the sequence

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from eventloop.toolbox import describe, is_pair, map_tensors

_TOKENS = "input_ids"


def length_at(full: int, shortest: int, increment: int, done: float) -> int:
    """Returns how many tokens a sequence has: shortest + (full - shortest) * done, rounded down.

    Args:
        full: of the whole sequence.
        shortest: at the start of the run.
        increment: what lengths are multiples of; the whole needn't be one.
        done: share of the warm-up that is done, 0 to 1.

    Returns:
        At least one increment, at most `full`.
    """
    if done >= 1:
        return full
    length = int(shortest + (full - shortest) * done + 1e-6)  # 3 * (1 / 3) shall be 1
    return min(full, max(increment, length - length % increment))


def full_length(batch: Any) -> int:
    """Returns the length of a batch's sequences.

    Args:
        batch: a pair of tokens and targets, or a mapping with "input_ids": whole numbers of shape
            (B, T). Every other tensor of it is of shape (B, T) or (B, T, ...).

    Raises:
        ValueError: it is something else; the message says what.
    """
    tokens = batch[0] if is_pair(batch) else None
    if isinstance(batch, Mapping):
        tokens = batch.get(_TOKENS)
    if not isinstance(tokens, Tensor):
        raise ValueError(f"a batch that is {describe(batch)} has no tensor of tokens")
    if tokens.ndim != 2 or tokens.is_floating_point():
        raise ValueError(f"{tokens.dtype} of shape {tuple(tokens.shape)} is not a batch of tokens")
    for name, one in _parts(batch):
        if not isinstance(one, Tensor):
            raise ValueError(
                f"its {name} are {describe(one)}, not a tensor with a row of tokens each"
            )
        if one.shape[:2] != tokens.shape or tokens.shape[1] in one.shape[2:]:
            raise ValueError(
                f"its {name} of shape {tuple(one.shape)} aren't one for each of "
                f"{' x '.join(map(str, tokens.shape))} tokens"
            )
    return tokens.shape[1]


def truncate(batch: Any, length: int) -> Any:
    """Returns the first tokens of each sequence; the others are left out of the run."""
    return map_tensors(lambda one_BT: one_BT[:, :length].contiguous(), batch)


def reshape(batch: Any, length: int) -> Any:
    """Cuts each sequence into as many of this length as it holds, which follow each other.

    Tokens that are left over at the end of each are left out.
    """

    def cut(one_BT: Tensor) -> Tensor:
        num = one_BT.shape[1] // length
        return one_BT[:, : num * length].reshape(-1, length, *one_BT.shape[2:])

    return map_tensors(cut, batch)


def _parts(batch: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(batch, Mapping):
        yield from batch.items()
    else:
        yield "targets", batch[1]
