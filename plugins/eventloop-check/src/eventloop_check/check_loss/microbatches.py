"""Measures of a microbatch other than its loss: its sizes, and fingerprints of the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from eventloop.toolbox import num_samples, predictions
from eventloop_check.check_loss.compare import fingerprints
from eventloop_check.check_loss.samples import has_samples
from eventloop_check.check_loss.sequences import NotPaddedError, num_counted, real_positions


def sizes_of(batch: Any) -> dict[str, int]:
    """Returns the sizes by which a microbatch could be weighted in the mean."""
    sizes = {"samples": num_samples(batch) if has_samples(batch) else 0}
    for name, is_shifted in (("labels", False), ("shifted labels", True)):
        if (num := num_counted(batch, is_shifted=is_shifted)) is not None:
            sizes[name] = num
    try:
        real_BT = real_positions(batch)
    except NotPaddedError:
        return sizes
    return {**sizes, "tokens": int(real_BT.sum()), "positions": real_BT.numel()}


def prints_of(outputs: Any, batch: Any) -> list[Tensor] | None:
    """Returns the fingerprints of a model's outputs; None unless they are a tensor with a row per sample."""
    output = predictions(outputs)
    if not isinstance(output, Tensor) or not output.ndim or not has_samples(batch):
        return None
    if len(output) != num_samples(batch):
        return None
    try:
        return fingerprints(output, real_positions(batch))
    except NotPaddedError:
        return fingerprints(output)


def joined(rank_prints: Sequence[list[Tensor] | None]) -> list[Tensor]:
    """Concatenates the fingerprints of all ranks; empty if a rank has none."""
    joined_prints: list[Tensor] = []
    for prints in rank_prints:
        if prints is None:
            return []
        joined_prints += prints
    return joined_prints
