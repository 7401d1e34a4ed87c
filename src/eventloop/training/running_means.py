"""Means over samples: of the loss of an epoch, and of numbers that are logged in an evaluation."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor

from eventloop.devices import kind_of
from eventloop.forms import NonNegativeInt, as_dict, from_dict, is_a, meets, optional

if TYPE_CHECKING:
    from eventloop.distributed.processes import Processes

Number = float | Tensor
_TRAIN = "train/"
# How many losses are added up at once: always the same ones, whenever a checkpoint is saved, so
# that the last bits of the sum don't depend on that.
AT_ONCE = 64


_SCALAR = meets(lambda tensor: tensor.numel() == 1, is_a(Tensor), "a tensor of one number")
_OptionalScalar = Annotated[Tensor | None, optional(_SCALAR)]


@dataclass(frozen=True)
class EpochLossState:
    """The loss of an epoch in a checkpoint, as one rank knows it.

    Attributes:
        value: of the latest batch, shape ().
        total: the sum of the losses times samples, shape ().
        samples: of the batches in `total`.
        counts: the samples of the batches that aren't in `total` yet.
        losses: of these batches, shape (N,); None if there are none.
    """

    value: _OptionalScalar
    total: _OptionalScalar
    samples: NonNegativeInt
    counts: list[NonNegativeInt]
    losses: Tensor | None


class EpochLoss:
    """The losses of the batches of an epoch, as this rank knows them; nothing is read in a step.

    Args:
        device: where they are.

    Attributes:
        latest: of the latest batch that had one, shape (), detached; None before the first.
        each: those that aren't in the sum yet, each with the samples of its batch.
    """

    __slots__ = ("_device", "_dtype", "_samples", "_total", "each", "latest")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._dtype = kind_of(device).sum_dtype
        self.latest: Tensor | None = None
        self.start_epoch()

    def start_epoch(self) -> None:
        """Resets the mean."""
        self._total: Tensor | None = None
        self._samples = 0
        self.each: list[tuple[int, Tensor]] = []

    def fold(self) -> None:
        """Adds the losses that are kept one by one to the sum; due when as many are done."""
        self._total, self._samples = self._sums()
        self.each = []

    def mean(self, processes: Processes) -> Tensor | None:
        """Returns the mean over the samples of all ranks, shape (), float64; None without a loss.

        Collective: every rank must call it.
        """
        total, samples = self._sums()
        if not any(processes.all_gather(total is not None)):
            return None
        if total is None:
            total = torch.zeros((), dtype=self._dtype, device=self._device)
        # A rank's loss is weighted so that the mean over the ranks is that of the batch.
        sums = processes.mean(torch.stack([total, torch.full_like(total, samples)]))
        return sums[0] / sums[1]

    def state_dict(self) -> dict[str, Any]:
        """Returns an `EpochLossState`."""
        losses = [loss for _, loss in self.each]
        saved = EpochLossState(
            value=self.latest,
            total=self._total,
            samples=self._samples,
            counts=[samples for samples, _ in self.each],
            losses=torch.stack(losses) if losses else None,
        )
        return as_dict(saved)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores an `EpochLossState`."""
        saved = from_dict(EpochLossState, state)
        self.latest = self._on_device(saved.value)
        self._total = self._on_device(saved.total)
        self._samples = saved.samples
        losses = self._on_device(saved.losses)
        each = () if losses is None else losses.unbind()
        self.each = list(zip(saved.counts, each, strict=True))

    def _on_device(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(self._device)

    def _sums(self) -> tuple[Tensor | None, int]:
        """Returns the losses times samples, added up in float64, and the samples."""
        total = self._total
        samples = self._samples
        for count, group in itertools.groupby(self.each, itemgetter(0)):
            losses = [loss for _, loss in group]
            part = torch.stack(losses).sum(dtype=self._dtype) * count
            total = part if total is None else total + part
            samples += count * len(losses)
        return total, samples


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
        sums = self._sums
        self._sums = {}
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
