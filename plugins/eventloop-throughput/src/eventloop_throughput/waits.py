"""How long the loop waited for each data loader, and advice if it was long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TRAIN_DATA = "train data"
_LEAST_FRAC = 0.1
_LEAST_S = 1.0


@dataclass
class Wait:
    """The times of one data loader.

    Attributes:
        wait_s: until batches were there.
        seconds: of the training or the evaluation as a whole.
    """

    wait_s: float = 0.0
    seconds: float = 0.0

    @property
    def frac(self) -> float:
        """The share of the time that was spent waiting."""
        return self.wait_s / self.seconds if self.seconds else 0.0


@dataclass
class Waits:
    """Adds up the waiting by data loader."""

    by_source: dict[str, Wait] = field(default_factory=dict)

    def add(self, source: str, wait_s: float, seconds: float) -> None:
        """Takes in a batch, or an evaluation."""
        wait = self.by_source.setdefault(source, Wait())
        wait.wait_s += wait_s
        wait.seconds += seconds

    def advice(self, dataloaders: Mapping[str, Any], *, is_host: bool) -> str:
        """Returns a line about the data that were waited for longest; "" if none were for long.

        Long is more than a tenth of the time, and a second.

        Args:
            dataloaders: by the sources' names.
            is_host: whether the loop's own device computes: a separate device may have computed meanwhile.
        """
        long = {
            name: wait
            for name, wait in self.by_source.items()
            if wait.frac > _LEAST_FRAC and wait.wait_s > _LEAST_S
        }
        if not long:
            return ""
        ordered = sorted(long, key=lambda name: long[name].wait_s, reverse=True)
        listed = [
            f"{long[name].wait_s:,.1f} s ({long[name].frac:.0%}) for {name}" for name in ordered
        ]
        busy = "" if is_host else ", in which the device may have been busy"
        return f"waited {' and '.join(listed)}{busy}; try {_to_try(dataloaders.get(ordered[0]))}"


def _to_try(dataloader: Any) -> str:
    """Returns a change that could make a data loader faster."""
    num_workers = getattr(dataloader, "num_workers", None)
    if num_workers is None:
        return "to prepare batches in the background: a DataLoader with num_workers"
    if num_workers == 0:
        return "num_workers=2 or more in its DataLoader"
    prefetch = getattr(dataloader, "prefetch_factor", None) or 2
    return (
        f"more workers than num_workers={num_workers}, prefetch_factor={2 * prefetch} if batches "
        "take unequally long, or less work for each sample"
    )
