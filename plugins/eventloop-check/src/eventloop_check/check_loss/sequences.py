"""Batches of padded sequences: other lengths, more padding, other tokens in the padding.

Every batch is cut from a batch of the task's data loader, so that no sequence becomes longer than those
that the model has processed.
"""

# B = batch, T = position

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eventloop.toolbox import targets_of

IGNORED = -100  # ignored label of torch's cross_entropy and of transformers
_MASK = "attention_mask"
_NO_PADDING = "it isn't one of padded sequences: no attention_mask, no label -100"
_MOST_CUT = 4
# Share of its length that a sequence keeps; unequal, so that microbatches differ in number of labels.
_SHARES = (0.75, 0.5, 1.0, 0.25)


class NotPaddedError(ValueError):
    """A batch isn't one of padded sequences, or its padding can't be changed."""


@dataclass(frozen=True)
class Sequences:
    """A batch of padded sequences, and the lengths to which to cut them.

    Args:
        batch: a batch of the data loader.
        lengths: number of positions of each sequence to keep, shape (B,).
        columns: number of positions in the batch; `short` has fewer.
        cut: number of positions by which `short` is shorter.
        is_left: whether padding comes first.
        pad: the token in the padding.
        other: another token, for the padding.
        label: the label of padding.
        skips_first: whether the first label of a sequence after left padding is ignored.
    """

    batch: Any
    lengths: Tensor
    columns: int
    cut: int
    is_left: bool
    pad: float
    other: float
    label: float
    skips_first: bool

    @classmethod
    def of(cls, batch: Any) -> Sequences:
        """Finds the padding of a batch: by its attention mask, else by labels that are ignored.

        Raises:
            NotPaddedError: the batch has no padding, or it can't be changed.
        """
        real_BT = real_positions(batch)
        if _mask_of(batch) is None and not (targets_of(batch) == IGNORED).any():
            raise NotPaddedError(_NO_PADDING)
        size, columns = real_BT.shape
        lengths_B = real_BT.sum(1)
        positions_T = torch.arange(columns, device=real_BT.device)
        is_left = bool((~real_BT[:, 0]).any())
        if is_left:
            expected_BT = positions_T >= columns - lengths_B[:, None]
        else:
            expected_BT = positions_T < lengths_B[:, None]
        if not torch.equal(real_BT, expected_BT):
            raise NotPaddedError("its padding has gaps, or is on both sides")
        if columns < 4:
            raise NotPaddedError(f"its sequences have {columns} positions, too few to cut")
        cut = min(_MOST_CUT, columns // 4)
        shares = torch.tensor(_SHARES, device=real_BT.device).repeat(size)[:size]
        limits_B = lengths_B.clamp(max=columns - cut)
        target_lengths_B = (limits_B * shares).round().long().clamp(min=2)
        skips_first = is_left and _skips_first(targets_of(batch), real_BT)
        min_lengths_B = _with_labels(targets_of(batch), columns, is_left) + int(skips_first)
        min_lengths_B = min_lengths_B.to(target_lengths_B.device)
        cut_lengths_B = torch.maximum(target_lengths_B, min_lengths_B).minimum(limits_B)
        if (cut_lengths_B < min_lengths_B).any():
            raise NotPaddedError("cut by a few positions, a sequence would have no label left")
        ids = _ids_of(batch)
        pad = _first_padded(ids, real_BT, 0.0)
        return cls(
            batch,
            cut_lengths_B,
            columns,
            cut,
            is_left,
            pad,
            _other_token(ids, pad),
            _first_padded(targets_of(batch), real_BT, float(IGNORED)),
            skips_first,
        )

    def short(self) -> Any:
        """Returns the batch, a few positions shorter, with sequences of unequal lengths."""
        return self._cut(self.columns - self.cut, self.pad)

    def padded(self) -> Any:
        """Returns the same sequences with more padding."""
        return self._cut(self.columns, self.pad)

    def with_other_padding(self) -> Any:
        """Returns the same sequences with other tokens in the padding."""
        return self._cut(self.columns - self.cut, self.other)

    def _cut(self, columns: int, token: float) -> Any:
        batch = self.batch
        if isinstance(batch, Mapping):
            return {name: self._part(name, value, columns, token) for name, value in batch.items()}
        inputs, targets = batch
        tensors = [
            self._part("input_ids", inputs, columns, token),
            self._part("labels", targets, columns, token),
        ]
        return tuple(tensors) if isinstance(batch, tuple) else tensors

    def _part(self, name: str, value: Any, columns: int, token: float) -> Any:
        """Cuts and pads a tensor of the batch; values without positions stay unchanged."""
        num = len(self.lengths)
        if not isinstance(value, Tensor) or value.shape[:2] != (num, self.columns):
            return value
        fill = {"labels": self.label, "input_ids": token}.get(name, 0.0)
        cut_value = (
            value[:, self.columns - columns :] if self.is_left else value[:, :columns]
        ).clone()
        cut_value[~self._real(columns).to(cut_value.device)] = torch.tensor(fill).to(cut_value)
        if name == "labels" and self.skips_first:
            rows_B = torch.arange(num, device=cut_value.device)
            cut_value[rows_B, columns - self.lengths.to(cut_value.device)] = IGNORED
        return cut_value

    def _real(self, columns: int) -> Tensor:
        positions_T = torch.arange(columns, device=self.lengths.device)
        lengths_B1 = self.lengths[:, None]
        return positions_T >= columns - lengths_B1 if self.is_left else positions_T < lengths_B1


def real_positions(batch: Any) -> Tensor:
    """Returns which positions of a batch of sequences aren't padding, bool, shape (B, T).

    Raises:
        NotPaddedError: it has neither an attention mask nor labels for each position.
    """
    mask = _mask_of(batch)
    if mask is not None:
        if mask.ndim != 2:
            raise NotPaddedError(f"its attention mask has the shape {tuple(mask.shape)}")
        return mask.bool()
    labels = targets_of(batch)
    if not _are_per_position(labels):
        raise NotPaddedError(_NO_PADDING)
    # Padding starts after the last label that isn't ignored; labels before it may be ignored, too.
    counted_BT: Tensor = labels != IGNORED
    return counted_BT.flip(1).cumsum(1).flip(1) > 0


def num_counted(batch: Any, *, is_shifted: bool = False) -> int | None:
    """Returns the number of labels that aren't ignored; None if there is no label per position.

    Args:
        is_shifted: whether each position is predicted from the preceding one, so that the first label
            of a sequence is unused.
    """
    labels = targets_of(batch)
    if not _are_per_position(labels):
        return None
    return int((labels[:, int(is_shifted) :] != IGNORED).sum())


def _mask_of(batch: Any) -> Tensor | None:
    mask = batch.get(_MASK) if isinstance(batch, Mapping) else None
    return mask if isinstance(mask, Tensor) else None


def _are_per_position(labels: Any) -> bool:
    return isinstance(labels, Tensor) and labels.ndim == 2 and not labels.is_floating_point()


def _with_labels(labels: Any, columns: int, is_left: bool) -> Tensor:
    """Returns the length of each sequence that keeps two of its labels, or its only one, shape (B,)."""
    if not _are_per_position(labels) or labels.shape[1] != columns:
        return torch.tensor(0)
    counted_BT = (labels != IGNORED).flip(1) if is_left else labels != IGNORED
    enough_BT = counted_BT.cumsum(1) >= counted_BT.sum(1, keepdim=True).clamp(max=2)
    min_lengths_B: Tensor = enough_BT.int().argmax(1) + 1
    return min_lengths_B


def _skips_first(labels: Any, real_BT: Tensor) -> bool:
    """Whether the first label after left padding is ignored in every sequence.

    It is ignored if positions predict the next label: its prediction would come from the padding.
    """
    if not _are_per_position(labels) or labels.shape != real_BT.shape:
        return False
    first_BT = real_BT & ~real_BT.roll(1, 1)
    first_BT[:, 0] = False
    return bool((labels[first_BT] == IGNORED).all())


def _ids_of(batch: Any) -> Tensor:
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch[0]
    return ids if isinstance(ids, Tensor) else torch.zeros(0)


def _first_padded(values: Any, real_BT: Tensor, default: float) -> float:
    """Returns the value at the first padded position, or `default` without padding."""
    if not isinstance(values, Tensor) or values.shape != real_BT.shape:
        return default
    padding = values[~real_BT.to(values.device)]
    return float(padding[0]) if padding.numel() else default


def _other_token(ids: Tensor, pad: float) -> float:
    other_tokens = ids[ids != pad]
    return float(other_tokens.flatten()[0]) if other_tokens.numel() else pad
