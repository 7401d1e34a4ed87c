"""Means over samples: of an epoch's loss, and of numbers that are logged during an evaluation."""

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
# The number of losses that are summed at once. The groups don't depend on when checkpoints are saved,
# or a resumed run's sum would differ in its last bits.
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
    """This rank's losses of the batches of an epoch; no step reads them from the device.

    Args:
        device: the device of the losses.

    Attributes:
        latest: the loss of the latest batch that had a loss, shape (), detached; None before the first.
        each: the losses that aren't in the sum yet, each with the number of samples of its batch.
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
        """Adds the losses in `each` to the sum; to be called every `AT_ONCE` batches."""
        self._total, self._samples = self._sums()
        self.each = []

    def mean(self, processes: Processes) -> Tensor | None:
        """Returns the mean over the samples of all ranks, shape (), float64; None if there is no loss.

        Collective: every rank must call it.
        """
        total, samples = self._sums()
        if not any(processes.all_gather(total is not None)):
            return None
        if total is None:
            total = torch.zeros((), dtype=self._dtype, device=self._device)
        # The ranks' losses are scaled so that their plain mean is the mean over the global batch.
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
        """Returns the sum of losses times samples, in float64, and the number of samples."""
        total = self._total
        samples = self._samples
        # Batches of the same size are summed with one kernel.
        for count, group in itertools.groupby(self.each, itemgetter(0)):
            losses = [loss for _, loss in group]
            weighted_sum = torch.stack(losses).sum(dtype=self._dtype) * count
            total = weighted_sum if total is None else total + weighted_sum
            samples += count * len(losses)
        return total, samples


class SetNumbers:
    """Sums the numbers that are logged for an eval set, by name, on their devices."""

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        self._sums: dict[str, _Sum] = {}

    def record(self, name: str, value: Number, weight: Number, reduce: str | None) -> None:
        """Adds a number of an eval batch.

        Args:
            name: a prefix "train/" is removed, so that a loss function may log the same name in
                training and evaluation.
            weight: the weight of the batch in the mean.
            reduce: "sum" for the sum over the eval set; otherwise the mean.
        """
        name = name.removeprefix(_TRAIN)
        running = self._sums.get(name)
        if running is None:
            self._sums[name] = running = _Sum(is_mean=reduce != "sum")
        running.total = running.total + weighted(value, weight if running.is_mean else 1)
        running.weight = running.weight + weight

    def forget(self) -> None:
        """Discards all numbers, for example of an evaluation that raised."""
        self._sums = {}

    def take(self, processes: Processes, device: torch.device) -> dict[str, Tensor]:
        """Returns the numbers over all ranks, in float64, and resets them.

        Collective: every rank must call it, even if it has no numbers.
        """
        sums = self._sums
        self._sums = {}
        local_names = {name: running.is_mean for name, running in sums.items()}
        is_mean_by_name: dict[str, bool] = {}
        for names in processes.all_gather(local_names):
            is_mean_by_name |= names
        if not is_mean_by_name:
            return {}
        zero = _Sum(is_mean=True)
        values = []
        for name in is_mean_by_name:
            running = sums.get(name, zero)
            values += [on_device(running.total, device), on_device(running.weight, device)]
        means = processes.mean(torch.stack(values)).reshape(-1, 2)
        results = {}
        for (name, is_mean), (total, weight) in zip(is_mean_by_name.items(), means, strict=True):
            results[name] = total / weight if is_mean else total * processes.data_world_size
        return results


class _Sum:
    """The weighted sum of a number over the batches so far, and the sum of their weights."""

    __slots__ = ("is_mean", "total", "weight")

    def __init__(self, *, is_mean: bool) -> None:
        self.is_mean = is_mean
        self.total: Number = 0.0
        self.weight: Number = 0.0


def weighted(value: Number, weight: Number) -> Number:
    """Returns value times weight, in float64; 0 if the weight is 0, even if the value is NaN."""
    if isinstance(value, Tensor):
        value = value.to(kind_of(value.device).sum_dtype).reshape(())
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, 0.0, value * weight)
    return value * weight if weight else 0.0


def on_device(value: Number, device: torch.device) -> Tensor:
    """Returns a number as a new tensor in the device's dtype for sums; doesn't wait for the device."""
    if isinstance(value, Tensor):
        return value.to(device, kind_of(device).sum_dtype, copy=True)
    return torch.full((), float(value), dtype=kind_of(device).sum_dtype, device=device)
