"""Logged numbers: kept on the device, weighted like the loss, delivered once they are on the host."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from eventloop.clock import Clock, Counts, Time, moment_of
from eventloop.devices import kind_of, opened_accelerator
from eventloop.training.logged_text import Text, Texts
from eventloop.training.running_means import Number, SetNumbers, weighted

if TYPE_CHECKING:
    from eventloop.plugin.plans import Plans
    from eventloop.state import State

Reduction = Literal["mean", "sum"]


def copied_number(name: str, value: Number, reduce: Reduction | None) -> Number:
    """Returns a number, or a detached copy of a tensor, since the caller may write to its tensor later.

    Raises:
        TypeError: `value` is not a single real number.
        ValueError: `reduce` is not None, "mean" or "sum".
    """
    if reduce not in (None, "mean", "sum"):
        raise ValueError(f"reduce={reduce!r} is none of None, 'mean', 'sum'")
    if not isinstance(value, Tensor):
        if not isinstance(value, (int, float)):
            raise TypeError(f"log({name!r}, ...) takes a number, not {type(value).__name__}")
        return value
    if value.numel() != 1:
        shape = tuple(value.shape)
        raise TypeError(f"log({name!r}, ...) takes one number, not a tensor of {shape}")
    if value.is_complex():
        raise TypeError(f"log({name!r}, ...) takes a real number, not a complex one")
    return value.detach().clone()


class Share(NamedTuple):
    """A rank's share of a mean over the ranks.

    Attributes:
        total: the sum of the rank's values times their weights.
        weight: the sum of the weights.
    """

    total: Number
    weight: Number

    def mean(self) -> Number:
        """Returns the mean over this rank's values; NaN if the weight is the number 0."""
        if not isinstance(self.weight, Tensor) and not self.weight:
            return math.nan
        return self.total / self.weight


# A share for each update of a batch. The logged number is the mean over the updates' means.
Shares = tuple[Share, ...]
Row = dict[str, Number | Shares]
Cell = tuple[Row, str]  # a number's row and its name
Reduce = Callable[[], Iterable[Cell]]
OverRanks = Callable[[Sequence[Row], Mapping[str, Reduction]], Reduce]
# Moments, rows, cells with tensors, the rows of numbers, and the function that reduces these.
_Compared = tuple[list[Counts], list[Row | Texts], list[Cell], list[Row], Reduce]
# The weights of a batch or an update without microbatches.
_SINGLE_WEIGHT: Sequence[Number] = (1.0,)


class Numbers:
    """The numbers that were logged but not delivered yet, a row for each moment.

    Args:
        interval: how often they are copied to the host.
        over_ranks: starts to compare between ranks the names in rows that are about to be copied.
            Returns a function that waits for the comparison, replaces this rank's values by values
            over all ranks, as tensors, and returns their cells. None for a single rank.

    Attributes:
        weights: the weights of the current batch's microbatches; None if the batch isn't split.
        of_set: the numbers logged while an eval set is evaluated.
    """

    def __init__(self, interval: Time, over_ranks: OverRanks | None = None) -> None:
        self.interval = interval
        self.is_heard = True
        self._over_ranks = over_ranks
        self._reductions: dict[str, Reduction] = {"train/loss": "mean"}
        self.weights: Sequence[Number] | None = None
        self.of_set = SetNumbers()
        self._microbatch_values: dict[str, dict[int, _MicrobatchValues]] = {}
        self._update = 0
        self._row: Row = {}
        self._texts = Texts()
        self._rows: list[Row | Texts] = []
        self._moments: list[Counts] = []
        # Cells with tensors. A cell may be listed twice, or contain a number if it was overwritten.
        self._tensors: list[Cell] = []
        # With several ranks, rows are copied a batch later, so that no rank waits for the comparison.
        self._compared: _Compared | None = None
        self._copies: deque[_Copied] = deque()

    def record(self, name: str, value: float | Tensor, reduce: Reduction | None = None) -> None:
        """Records a number for the current moment; replaces an earlier number of the same name.

        Args:
            value: a number, or a detached tensor with one entry that isn't written to any more.
            reduce: whether the ranks' values are averaged or summed; every rank must then record it.
        """
        if not self.is_heard:
            return
        self._row[name] = value
        if isinstance(value, Tensor):
            self._tensors.append((self._row, name))
        if reduce is not None:
            self._reductions[name] = reduce

    def record_part(
        self, name: str, value: Number, idx: int, reduce: Reduction | None = None
    ) -> None:
        """Records a number of a microbatch; the batch's number is their mean, weighted like the loss.

        A batch with several updates gets the mean over its updates. With "sum", microbatches, updates
        and ranks are summed instead.

        Args:
            value: see `record`.
            idx: the index of the microbatch.
        """
        weights = self.weights
        update = self._update
        if weights is None and not update:
            self.record(name, value, reduce)
        elif self.is_heard:
            updates = self._microbatch_values.get(name)
            if updates is None:
                self._microbatch_values[name] = updates = {}
                # The first update had no microbatches, so its number went into the row directly.
                earlier_value = self._row.get(name) if update else None
                if earlier_value is not None and not isinstance(earlier_value, tuple):
                    updates[0] = _MicrobatchValues(_SINGLE_WEIGHT, reduce)
                    updates[0].values[0] = earlier_value
            weights = weights or _SINGLE_WEIGHT
            microbatches = updates.get(update)
            # Other weights mean that the update was started again with other microbatches.
            if microbatches is None or microbatches.weights is not weights:
                updates[update] = microbatches = _MicrobatchValues(weights, reduce)
            microbatches.values[idx] = value

    def record_text(self, name: str, text: Text) -> None:
        """Records a text for the current moment; replaces an earlier text of the same name."""
        if self.is_heard:
            self._texts[name] = text

    def next_update(self) -> None:
        """Ends an update of a batch with several updates."""
        self._update += 1
        self.weights = None

    def record_batch(self, loss: Tensor | None, optimizers: Mapping[str, Optimizer]) -> None:
        """Records the loss of a batch, if it has one, and the learning rates."""
        if not self.is_heard:
            return
        self._update = 0
        if self._microbatch_values:
            self._join_microbatches()
        row = self._row
        if loss is not None:
            row["train/loss"] = loss
            self._tensors.append((row, "train/loss"))
        for name, optimizer in optimizers.items():
            for idx, group in enumerate(groups := optimizer.param_groups):
                key = f"lr/{name}" if len(groups) == 1 else f"lr/{name}/{group.get('name', idx)}"
                rate = group.get("lr")
                if type(rate) is not float and isinstance(rate, Tensor):
                    rate = rate.clone()  # schedulers change it in place
                    self._tensors.append((row, key))
                if rate is not None:
                    row[key] = rate

    def forget(self) -> None:
        """Discards the numbers of the current moment, for example of a batch that raised."""
        self._tensors = [(row, name) for row, name in self._tensors if row is not self._row]
        self._row = {}
        self._microbatch_values = {}
        self._update = 0
        self._texts = Texts()

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Discards everything that is recorded within the block."""
        is_heard = self.is_heard
        self.is_heard = False
        try:
            yield
        finally:
            self.is_heard = is_heard

    def deliver(self, state: State, hooks: Plans) -> None:
        """Ends the current row; delivers in order the rows that have reached the host.

        Starts to copy the rows so far if the interval is over.
        """
        copies = self._copies
        clock = state.clock
        if self._row:
            self._rows.append(self._row)
            self._moments.append(clock._now)
            self._row = {}
        if self._texts:
            self._end_texts(clock)
        if self._compared is not None:
            self._copy_compared()
        # Comparing is collective, so a rank without rows takes part, too. Whether a plugin listens is
        # the same on all ranks.
        if (self._rows or (self._over_ranks and self.is_heard)) and clock.crossed(self.interval):
            self._start_copy()
        while copies and copies[0].is_ready():
            copies.popleft().deliver(state, hooks)

    def deliver_all(self, state: State, hooks: Plans, *, alone: bool = False) -> None:
        """Ends the current row; waits for all rows and delivers them in order.

        Args:
            alone: whether to do so without the other ranks; values that aren't reduced yet are then
                this rank's.
        """
        if self._row:
            self._rows.append(self._row)
            self._moments.append(state.clock._now)
            self._row = {}
        self._end_texts(state.clock)
        self._copy_compared(alone=alone)
        if self._rows or (self._over_ranks and self.is_heard):
            self._start_copy(alone=alone)
            self._copy_compared()
        while self._copies:
            self._copies.popleft().deliver(state, hooks)

    def _end_texts(self, clock: Clock) -> None:
        if self._texts:
            self._rows.append(self._texts)
            self._moments.append(clock._now)
            self._texts = Texts()

    def _join_microbatches(self) -> None:
        """Combines the values of microbatches and updates into a number each, in the current row."""
        values_by_name = self._microbatch_values
        self._microbatch_values = {}
        for name, updates_by_idx in values_by_name.items():
            updates = tuple(updates_by_idx.values())
            reduce = updates[-1].reduce
            if reduce == "sum":
                values = [value for update in updates for value in update.values.values()]
                self.record(name, sum(values), "sum")
            elif reduce is None or self._over_ranks is None:
                self.record(name, mean([update.mean() for update in updates]))
            else:
                # The ranks' means have different weights, so totals and weights are reduced apart.
                self._row[name] = tuple(update.share() for update in updates)
                self._reductions[name] = reduce

    def _start_copy(self, *, alone: bool = False) -> None:
        moments = self._moments
        rows = self._rows
        tensors = self._tensors
        self._moments = []
        self._rows = []
        self._tensors = []
        if self._over_ranks is None:
            self._copies.append(_Copied(moments, rows, tensors))
            return
        numbers = [row for row in rows if not isinstance(row, Texts)]
        if alone:
            self._copies.append(_Copied(moments, rows, [*tensors, *_use_local_means(numbers)]))
        else:
            reduce = self._over_ranks(numbers, self._reductions)
            self._compared = moments, rows, tensors, numbers, reduce

    def _copy_compared(self, *, alone: bool = False) -> None:
        if self._compared is not None:
            moments, rows, tensors, numbers, reduce = self._compared
            self._compared = None
            tensors += _use_local_means(numbers) if alone else reduce()
            self._copies.append(_Copied(moments, rows, tensors))


class _MicrobatchValues:
    """The numbers of one name logged for the microbatches of an update.

    Args:
        weights: the weight of each microbatch.
        reduce: see `Numbers.record`.

    Attributes:
        values: by the index of the microbatch.
    """

    __slots__ = ("reduce", "values", "weights")

    def __init__(self, weights: Sequence[Number], reduce: Reduction | None) -> None:
        self.weights = weights
        self.reduce = reduce
        self.values: dict[int, Number] = {}

    def share(self) -> Share:
        """Returns their weighted sum, in float64, and the sum of their weights."""
        weights = [self.weights[idx] for idx in self.values]
        products = map(weighted, self.values.values(), weights)
        return Share(sum(products), sum(weights))

    def mean(self) -> Number:
        """Returns their weighted mean; the plain mean if all weights are the number 0."""
        values = list(self.values.values())
        if len(values) == 1:
            return values[0]
        share = self.share()
        if isinstance(share.weight, Tensor) or share.weight:
            return share.mean()
        return sum(values) / len(values)


def mean(values: Sequence[Number]) -> Number:
    """Returns the mean of numbers, in float64; a single number is returned as it is."""
    if len(values) == 1:
        return values[0]
    return sum(weighted(value, 1.0) for value in values) / len(values)


def _use_local_means(rows: Iterable[Row]) -> Iterable[Cell]:
    """Replaces shares in the rows by this rank's means, in place; returns their cells."""
    cells = []
    for row in rows:
        for name, value in row.items():
            if isinstance(value, tuple):
                row[name] = mean([share.mean() for share in value])
                cells.append((row, name))
    return cells


class _Copied:
    """Rows that are being copied to the host, and the moment of each."""

    def __init__(self, moments: list[Counts], rows: list[Row | Texts], tensors: list[Cell]) -> None:
        self._moments = moments
        self._rows = rows
        self._tensors = [(row, name) for row, name in tensors if isinstance(row[name], Tensor)]
        self._copy = HostCopy(cast("list[Tensor]", [row[name] for row, name in self._tensors]))
        self.is_ready = self._copy.is_ready

    def deliver(self, state: State, hooks: Plans) -> None:
        """Calls `log` and `log_text` with the rows, with numbers in place of tensors."""
        for (row, name), number in zip(self._tensors, self._copy.numbers(), strict=True):
            row[name] = number
        for moment, content in zip(map(moment_of, self._moments), self._rows, strict=True):
            if content.__class__ is Texts:  # cheaper than a call of isinstance
                hooks.log_text(state, content, moment)
            else:
                hooks.log(state, content, moment)  # type: ignore[arg-type]  # tensors were replaced above


class HostCopy:
    """A copy of numbers to the host that runs while the device computes.

    Args:
        tensors: one entry each, of any dtype, on any device or the host; only work that is queued on
            the current stream may still write to them.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._events: Sequence[torch.Event] = ()
        if opened_accelerator() is not None:
            self._tensors, self._events = _started(tensors)

    def is_ready(self) -> bool:
        """Returns whether `numbers` would return without waiting."""
        return all(event.query() for event in self._events)

    def numbers(self) -> list[float]:
        """Returns the numbers; waits for copies that aren't finished."""
        for event in self._events:
            event.synchronize()
        return list(map(Tensor.item, self._tensors))


def _started(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[torch.Event]]:
    """Starts to copy tensors; returns them on the host, and events that are recorded after the copies.

    The tensors of a dtype and device are stacked, since a copy costs much more than its few bytes.
    """
    on_host = list(tensors)
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for idx, tensor in enumerate(tensors):
        if not tensor.is_cpu:
            groups.setdefault((tensor.dtype, tensor.device), []).append(idx)
    for idxs in groups.values():
        stacked = torch.stack([tensors[idx].reshape(()) for idx in idxs])
        for idx, copy in zip(idxs, kind_of(stacked.device).host_copy(stacked), strict=True):
            on_host[idx] = copy
    events = (kind_of(device).record() for device in {device for _, device in groups})
    return on_host, [event for event in events if event is not None]
