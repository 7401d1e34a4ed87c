"""What is measured of a microbatch besides its loss: its sizes, and fingerprints of the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from eventloop.toolbox import num_samples, predictions
from eventloop_check.check_loss.compare import fingerprints
from eventloop_check.check_loss.samples import has_samples
from eventloop_check.check_loss.sequences import NotPaddedError, num_counted, real_positions


def sizes_of(batch: Any) -> dict[str, int]:
    """Returns by what a microbatch could be weighed in the mean."""
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
    """Returns the fingerprints of a model's outputs; None where they aren't one tensor of samples."""
    found = predictions(outputs)
    if not isinstance(found, Tensor) or not found.ndim or not has_samples(batch):
        return None
    if len(found) != num_samples(batch):
        return None
    try:
        return fingerprints(found, real_positions(batch))
    except NotPaddedError:
        return fingerprints(found)


def joined(several: Sequence[list[Tensor] | None]) -> list[Tensor]:
    """Returns the fingerprints of all ranks; none where a rank has none."""
    if any(one is None for one in several):
        return []
    return [found for one in several if one is not None for found in one]
