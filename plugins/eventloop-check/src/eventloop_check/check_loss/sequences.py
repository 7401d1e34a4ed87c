"""Batches of padded sequences: other lengths, more padding, other tokens in the padding.

Every batch is cut from one that the task's data loader made, so that no sequence becomes longer than
the model has seen.
"""

# B = batch, T = position

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eventloop.toolbox import targets_of

IGNORED = -100  # of torch's cross_entropy, and of transformers' labels
_MASK = "attention_mask"
_NO_PADDING = "it isn't one of padded sequences: no attention_mask, no label -100"
_MOST_CUT = 4
# Of its length, what a sequence keeps: unequal, so that each microbatch has another number of labels.
_SHARES = (0.75, 0.5, 1.0, 0.25)


class NotPaddedError(ValueError):
    """A batch isn't one of padded sequences, or its padding can't be changed."""


@dataclass(frozen=True)
class Sequences:
    """A batch of padded sequences, and what is left of each when the batch is cut.

    Args:
        batch: of the data loader.
        lengths: how many positions of each sequence are kept, shape (B,).
        columns: how many positions the batch has; `short` has fewer.
        cut: by how many positions `short` is shorter.
        is_left: whether padding comes first.
        pad: the token in the padding.
        other: another token.
        label: what the labels are there.
        skips_first: whether the first label of a sequence behind padding doesn't count.
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
            NotPaddedError: there is none, or it can't be changed.
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
        wanted_B = (limits_B * shares).round().long().clamp(min=2)
        skips_first = is_left and _skips_first(targets_of(batch), real_BT)
        least_B = _with_labels(targets_of(batch), columns, is_left) + int(skips_first)
        cut_lengths_B = torch.maximum(wanted_B, least_B.to(wanted_B.device)).minimum(limits_B)
        if (cut_lengths_B < least_B.to(cut_lengths_B.device)).any():
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
            return {name: self._part(name, one, columns, token) for name, one in batch.items()}
        inputs, targets = batch
        parts = [
            self._part("input_ids", inputs, columns, token),
            self._part("labels", targets, columns, token),
        ]
        return tuple(parts) if isinstance(batch, tuple) else parts

    def _part(self, name: str, part: Any, columns: int, token: float) -> Any:
        """Returns one tensor of the batch, cut and padded; what has no such positions stays."""
        num = len(self.lengths)
        if not isinstance(part, Tensor) or part.shape[:2] != (num, self.columns):
            return part
        fill = {"labels": self.label, "input_ids": token}.get(name, 0.0)
        found = (part[:, self.columns - columns :] if self.is_left else part[:, :columns]).clone()
        found[~self._real(columns).to(found.device)] = torch.tensor(fill).to(found)
        if name == "labels" and self.skips_first:
            rows_B = torch.arange(num, device=found.device)
            found[rows_B, columns - self.lengths.to(found.device)] = IGNORED
        return found

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
    # What follows the last label that counts is padding; labels before it may be ignored as well.
    counted_BT: Tensor = labels != IGNORED
    return counted_BT.flip(1).cumsum(1).flip(1) > 0


def num_counted(batch: Any, *, is_shifted: bool = False) -> int | None:
    """Returns how many labels of a batch of sequences count; None if it isn't one.

    Args:
        is_shifted: whether each position is predicted from the one before, so that the first
            label of a sequence doesn't count.
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
    """Returns how much of each sequence must stay so that two labels count, or its only one."""
    if not _are_per_position(labels) or labels.shape[1] != columns:
        return torch.tensor(0)
    counted_BT = (labels != IGNORED).flip(1) if is_left else labels != IGNORED
    enough_BT = counted_BT.cumsum(1) >= counted_BT.sum(1, keepdim=True).clamp(max=2)
    least_B: Tensor = enough_BT.int().argmax(1) + 1
    return least_B


def _skips_first(labels: Any, real_BT: Tensor) -> bool:
    """Returns whether labels behind padding on the left begin with one that doesn't count.

    What would predict it stands in the padding.
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
    """Returns the value at the first padded position, or `default` if there is none."""
    if not isinstance(values, Tensor) or values.shape != real_BT.shape:
        return default
    padding = values[~real_BT.to(values.device)]
    return float(padding[0]) if padding.numel() else default


def _other_token(ids: Tensor, pad: float) -> float:
    others = ids[ids != pad]
    return float(others.flatten()[0]) if others.numel() else pad
