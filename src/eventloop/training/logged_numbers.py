"""Logged numbers: kept on the device, weighted like the loss, handed on when they are on the host."""

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
    """Returns a number, or a copy of a tensor of one, that the caller may change from here on.

    Raises:
        TypeError: `value` is not a single real number.
        ValueError: `reduce` is something else.
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
    """A rank's part of a mean over the ranks.

    Attributes:
        total: the rank's values times their weights.
        weight: what they weigh together.
    """

    total: Number
    weight: Number

    def mean(self) -> Number:
        """Returns the mean of this rank alone; NaN where nothing weighs."""
        if not isinstance(self.weight, Tensor) and not self.weight:
            return math.nan
        return self.total / self.weight


# Per update of a batch: the summands of its mean. The logged number is the mean of these means.
Shares = tuple[Share, ...]
Row = dict[str, Number | Shares]
Cell = tuple[Row, str]
Reduce = Callable[[], Iterable[Cell]]
OverRanks = Callable[[Sequence[Row], Mapping[str, Reduction]], Reduce]
# Moments, rows, cells of tensors, the rows of numbers, and what reduces these.
_Compared = tuple[list[Counts], list[Row | Texts], list[Cell], list[Row], Reduce]
# What a batch or an update in one piece weighs: it is the mean by itself.
_ALONE: Sequence[Number] = (1.0,)


class Numbers:
    """The numbers logged and not yet delivered, in rows of one moment each.

    Args:
        interval: how often they are copied to the host.
        over_ranks: starts to compare the names in rows that are about to be copied, and returns a
            function that waits for it, replaces this rank's values by those over all ranks, as
            tensors, and returns where it did; None with one rank.

    Attributes:
        weights: of the current batch's microbatches; None for a batch in one piece.
        of_set: what is logged while an eval set is under way.
    """

    def __init__(self, interval: Time, over_ranks: OverRanks | None = None) -> None:
        self.interval = interval
        self.is_heard = True
        self._over_ranks = over_ranks
        self._reductions: dict[str, Reduction] = {"train/loss": "mean"}
        self.weights: Sequence[Number] | None = None
        self.of_set = SetNumbers()
        self._parts: dict[str, dict[int, _Parts]] = {}
        self._update = 0
        self._row: Row = {}
        self._texts = Texts()
        self._rows: list[Row | Texts] = []
        self._at: list[Counts] = []
        # The cells of tensors; one may be listed twice, and hold a number by now.
        self._tensors: list[Cell] = []
        # With several ranks: what is copied a batch later, once the ranks have compared its names.
        self._compared: _Compared | None = None
        self._copies: deque[_Copied] = deque()

    def record(self, name: str, value: float | Tensor, reduce: Reduction | None = None) -> None:
        """Keeps a number for the moment under way; a later one of the same name replaces it.

        Args:
            value: a number, or a detached tensor of one entry that isn't written to any more.
            reduce: whether the ranks' values are averaged or added up; then all must record it.
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
        """Keeps a number of a microbatch; the batch has their mean, weighted as the loss is.

        With several updates, it is the mean over updates. With "sum", microbatches and updates are
        added up instead, as ranks are.

        Args:
            value: as `record` takes it.
            idx: of the microbatch.
        """
        weights = self.weights
        update = self._update
        if weights is None and not update:
            self.record(name, value, reduce)
        elif self.is_heard:
            if (updates := self._parts.get(name)) is None:
                self._parts[name] = updates = {}
                before = self._row.get(name) if update else None
                if before is not None and not isinstance(before, tuple):
                    # The batch was trained on in one piece before this update.
                    updates[0] = _Parts(_ALONE, reduce)
                    updates[0].values[0] = before
            weights = weights or _ALONE
            parts = updates.get(update)
            if parts is None or parts.weights is not weights:
                updates[update] = parts = _Parts(weights, reduce)
            parts.values[idx] = value

    def record_text(self, name: str, text: Text) -> None:
        """Keeps a text for the moment under way; a later one of the same name replaces it."""
        if self.is_heard:
            self._texts[name] = text

    def next_update(self) -> None:
        """Begins another of several updates of a batch, or ends the last one."""
        self._update += 1
        self.weights = None

    def record_batch(self, loss: Tensor | None, optimizers: Mapping[str, Optimizer]) -> None:
        """Keeps what every batch has: its loss, if any, and the learning rates."""
        if not self.is_heard:
            return
        self._update = 0
        if self._parts:
            self._join_parts()
        row = self._row
        if loss is not None:
            row["train/loss"] = loss
            self._tensors.append((row, "train/loss"))
        for name, optimizer in optimizers.items():
            for idx, group in enumerate(groups := optimizer.param_groups):
                key = f"lr/{name}" if len(groups) == 1 else f"lr/{name}/{group.get('name', idx)}"
                rate = group.get("lr")
                if type(rate) is not float and isinstance(rate, Tensor):
                    rate = rate.clone()  # schedulers write into it
                    self._tensors.append((row, key))
                if rate is not None:
                    row[key] = rate

    def forget(self) -> None:
        """Drops the numbers of the moment under way, which won't come."""
        self._tensors = [one for one in self._tensors if one[0] is not self._row]
        self._row = {}
        self._parts = {}
        self._update = 0
        self._texts = Texts()

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Drops what is recorded meanwhile."""
        is_heard = self.is_heard
        self.is_heard = False
        try:
            yield
        finally:
            self.is_heard = is_heard

    def deliver(self, state: State, hooks: Plans) -> None:
        """Ends the current row; hands those on, in order, that have reached the host.

        The copy of the rows so far starts when it is due.
        """
        copies = self._copies
        clock = state.clock
        if self._row:
            self._rows.append(self._row)
            self._at.append(clock._now)
            self._row = {}
        if self._texts:
            self._end_texts(clock)
        if self._compared is not None:
            self._copy_compared()
        # Ranks compare also what one has logged nothing of; whether a plugin listens is alike on all.
        if (self._rows or (self._over_ranks and self.is_heard)) and clock.crossed(self.interval):
            self._start_copy()
        while copies and copies[0].is_ready():
            copies.popleft().deliver(state, hooks)

    def deliver_all(self, state: State, hooks: Plans, *, alone: bool = False) -> None:
        """Ends the current row; waits for all rows and hands them on in order.

        Args:
            alone: without the other ranks; values not yet reduced stay those of this rank.
        """
        if self._row:
            self._rows.append(self._row)
            self._at.append(state.clock._now)
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
            self._at.append(clock._now)
            self._texts = Texts()

    def _join_parts(self) -> None:
        """Makes one number of those of microbatches and updates, by name, in the row under way."""
        parts = self._parts
        self._parts = {}
        for name, updates in parts.items():
            several = tuple(updates.values())
            if (reduce := several[-1].reduce) == "sum":
                values = [value for one in several for value in one.values.values()]
                self.record(name, sum(values), "sum")
            elif reduce is None or self._over_ranks is None:
                self.record(name, mean([one.mean() for one in several]))
            else:
                self._row[name] = tuple(one.share() for one in several)
                self._reductions[name] = reduce

    def _start_copy(self, *, alone: bool = False) -> None:
        at = self._at
        rows = self._rows
        tensors = self._tensors
        self._at = []
        self._rows = []
        self._tensors = []
        numbers = [one for one in rows if not isinstance(one, Texts)] if self._over_ranks else []
        if self._over_ranks is None or alone:
            self._copies.append(_Copied(at, rows, [*tensors, *_own_means(numbers)]))
        else:
            reduce = self._over_ranks(numbers, self._reductions)
            self._compared = at, rows, tensors, numbers, reduce

    def _copy_compared(self, *, alone: bool = False) -> None:
        if self._compared is not None:
            at, rows, tensors, numbers, reduce = self._compared
            self._compared = None
            tensors += _own_means(numbers) if alone else reduce()
            self._copies.append(_Copied(at, rows, tensors))


class _Parts:
    """The numbers of one name that the microbatches of an update have.

    Args:
        weights: what each microbatch weighs.
        reduce: see `Numbers.record`.

    Attributes:
        values: by the microbatch's number.
    """

    __slots__ = ("reduce", "values", "weights")

    def __init__(self, weights: Sequence[Number], reduce: Reduction | None) -> None:
        self.weights = weights
        self.reduce = reduce
        self.values: dict[int, Number] = {}

    def share(self) -> Share:
        """Returns their weighted sum, in float64, and what they weigh."""
        weights = [self.weights[idx] for idx in self.values]
        products = map(weighted, self.values.values(), weights)
        return Share(sum(products), sum(weights))

    def mean(self) -> Number:
        """Returns their weighted mean; that of a batch which counts for nothing isn't weighted."""
        (value, *others) = self.values.values()
        if not others:
            return value
        share = self.share()
        if isinstance(share.weight, Tensor) or share.weight:
            return share.mean()
        return sum(self.values.values()) / len(self.values)


def mean(values: Sequence[Number]) -> Number:
    """Returns the mean of several numbers, in float64; of one it is that number."""
    if len(values) == 1:
        return values[0]
    return sum(weighted(value, 1.0) for value in values) / len(values)


def _own_means(rows: Iterable[Row]) -> Iterable[Cell]:
    """Puts a rank's own means in the place of its shares; returns where."""
    cells = []
    for row in rows:
        for name, value in row.items():
            if isinstance(value, tuple):
                row[name] = mean([one.mean() for one in value])
                cells.append((row, name))
    return cells


class _Copied:
    """Rows on their way to the host, and the moment of each."""

    def __init__(self, at: list[Counts], rows: list[Row | Texts], tensors: list[Cell]) -> None:
        self._at = at
        self._rows = rows
        self._tensors = [(row, name) for row, name in tensors if isinstance(row[name], Tensor)]
        self._copy = HostCopy(cast("list[Tensor]", [row[name] for row, name in self._tensors]))
        self.is_ready = self._copy.is_ready

    def deliver(self, state: State, hooks: Plans) -> None:
        """Hands the rows on with their moments, with numbers in place of tensors."""
        for (row, name), number in zip(self._tensors, self._copy.numbers(), strict=True):
            row[name] = number
        for at, one in zip(map(moment_of, self._at), self._rows, strict=True):
            if one.__class__ is Texts:  # cheaper than a call
                hooks.log_text(state, one, at)
            else:
                hooks.log(state, one, at)  # type: ignore[arg-type]  # numbers by now


class HostCopy:
    """A copy that has been started and may be asked for later.

    Args:
        tensors: one entry each, of any type and device, the host too; only work queued on the
            current stream may still write into them.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._events: Sequence[torch.Event] = ()
        if opened_accelerator() is not None:
            self._tensors, self._events = _started(tensors)

    def is_ready(self) -> bool:
        """Whether `numbers` would return without waiting."""
        return all(event.query() for event in self._events)

    def numbers(self) -> list[float]:
        """Returns the numbers; waits for those that haven't been copied yet."""
        for event in self._events:
            event.synchronize()
        return list(map(Tensor.item, self._tensors))


def _started(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[torch.Event]]:
    """Starts a copy per dtype and device; returns the tensors on the host and the events behind it."""
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
