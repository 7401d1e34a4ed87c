"""Numbers that are logged while an eval set is under way: each one's mean over the set."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eventloop.devices import kind_of

if TYPE_CHECKING:
    from eventloop.distributed.processes import Processes

Number = float | Tensor
_TRAIN = "train/"


class SetNumbers:
    """Adds up the numbers of an eval set by name, on their devices."""

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        self._sums: dict[str, _Sum] = {}

    def record(self, name: str, value: Number, weight: Number, reduce: str | None) -> None:
        """Adds a number of an eval batch.

        Args:
            name: NAME for what is logged as train/NAME in training.
            weight: what the batch weighs in the mean.
            reduce: "sum" for the sum over the set instead.
        """
        name = name.removeprefix(_TRAIN)
        if (found := self._sums.get(name)) is None:
            self._sums[name] = found = _Sum(is_mean=reduce != "sum")
        found.total = found.total + weighted(value, weight if found.is_mean else 1)
        found.weight = found.weight + weight

    def forget(self) -> None:
        """Drops what an evaluation that failed has left."""
        self._sums = {}

    def take(self, processes: Processes, device: torch.device) -> dict[str, Tensor]:
        """Returns the numbers over the ranks, in float64, and resets them.

        Collective: every rank must call it, whichever names it has.
        """
        sums, self._sums = self._sums, {}
        mine = {name: one.is_mean for name, one in sums.items()}
        named = {
            name: is_mean for one in processes.all_gather(mine) for name, is_mean in one.items()
        }
        if not named:
            return {}
        nothing = _Sum(is_mean=True)
        pairs = [sums.get(name, nothing) for name in named]
        both = [on_device(value, device) for one in pairs for value in (one.total, one.weight)]
        totals = processes.mean(torch.stack(both)).reshape(-1, 2)
        return {
            name: total / weight if is_mean else total * processes.data_world_size
            for (name, is_mean), (total, weight) in zip(named.items(), totals, strict=True)
        }


class _Sum:
    """A number's sum over the batches so far, and what they weigh."""

    __slots__ = ("is_mean", "total", "weight")

    def __init__(self, *, is_mean: bool) -> None:
        self.is_mean = is_mean
        self.total: Number = 0.0
        self.weight: Number = 0.0


def weighted(value: Number, weight: Number) -> Number:
    """Returns value times weight in float64; 0 where nothing weighs, even if the value is NaN."""
    if isinstance(value, Tensor):
        value = value.to(kind_of(value.device).sum_dtype).reshape(())
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, 0.0, value * weight)
    return value * weight if weight else 0.0


def on_device(value: Number, device: torch.device) -> Tensor:
    """Returns a number as a wide tensor of its own, without waiting for the device."""
    if isinstance(value, Tensor):
        return value.to(device, kind_of(device).sum_dtype, copy=True)
    return torch.full((), float(value), dtype=kind_of(device).sum_dtype, device=device)
