"""Logged numbers: kept on the device, copied in one go, handed on when they have arrived."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, cast

from torch import Tensor
from torch.optim import Optimizer

from eventloop.clock import Clock, Moment, Time
from eventloop.core.host_copy import HostCopy

Row = dict[str, float | Tensor]
Reduction = Literal["mean", "sum"]
Delivery = tuple[Moment, dict[str, float]]
OverRanks = Callable[[Sequence[tuple[Moment, Row]], Mapping[str, Reduction]], None]


class Numbers:
    """The numbers logged and not yet delivered, in rows of one moment each.

    Args:
        interval: how often they are brought to the host.
        over_ranks: puts the values of all ranks in the place of this one's, in the rows that are
            about to be copied; not asked where there is one rank.
    """

    __slots__ = ("_copies", "_over_ranks", "_reductions", "_row", "_rows", "interval")

    def __init__(self, interval: Time, over_ranks: OverRanks | None = None) -> None:
        self.interval = interval
        self._over_ranks = over_ranks
        self._reductions: dict[str, Reduction] = {"train/loss": "mean"}
        self._row: Row = {}
        self._rows: list[tuple[Moment, Row]] = []
        self._copies: deque[_Copied] = deque()

    def record(self, name: str, value: float | Tensor, reduce: Reduction | None = None) -> None:
        """Keeps a number for the moment under way; a later one of the same name replaces it.

        Args:
            value: a number, or a detached tensor of one entry that nobody writes into any more.
            reduce: whether the ranks' values are averaged or added up; then all must record it.
        """
        self._row[name] = value
        if reduce is not None:
            self._reductions[name] = reduce

    def record_batch(self, loss: Tensor | None, optimizers: Mapping[str, Optimizer]) -> None:
        """Keeps what every batch has: its loss, if any, and the learning rates."""
        row = self._row
        if loss is not None:
            row["train/loss"] = loss
        for name, optimizer in optimizers.items():
            rate = optimizer.param_groups[0]["lr"]
            # Schedulers write into a rate that is a tensor.
            row[f"lr/{name}"] = rate.clone() if isinstance(rate, Tensor) else rate

    def forget(self) -> None:
        """Drops the numbers of the moment under way, which won't come."""
        self._row = {}

    def arrived(
        self, clock: Clock, *, everything: bool = False, alone: bool = False
    ) -> Sequence[Delivery]:
        """Ends the moment under way; gives the rows that are on the host by now, in order.

        The copy of the rows so far starts when it is due.

        Args:
            everything: starts the copy of all rows now and waits for it.
            alone: leaves the other ranks out: what isn't reduced yet stays this rank's.
        """
        row = self._row
        if row:
            self._rows.append((clock.moment(), row))
            self._row = {}
        if self._rows and (everything or clock.crossed(self.interval)):
            if self._over_ranks is not None and not alone:
                self._over_ranks(self._rows, self._reductions)
            self._copies.append(_Copied(self._rows))
            self._rows = []
        copies = self._copies
        rows: list[Delivery] = []
        while copies and (everything or copies[0].is_ready()):
            rows += copies.popleft().rows()
        return rows


class NoNumbers(Numbers):
    """What stands in the place of `Numbers` where no plugin listens: everything is dropped."""

    __slots__ = ()

    def record(self, name: str, value: float | Tensor, reduce: Reduction | None = None) -> None:
        """Drops a number."""

    def record_batch(self, loss: Tensor | None, optimizers: Mapping[str, Optimizer]) -> None:
        """Drops them."""

    def arrived(
        self, clock: Clock, *, everything: bool = False, alone: bool = False
    ) -> Sequence[Delivery]:
        """Gives nothing."""
        return ()


class _Copied:
    """Rows on their way to the host."""

    def __init__(self, rows: list[tuple[Moment, Row]]) -> None:
        self._rows = rows
        self._places = [
            (row, name)
            for _, row in rows
            for name, value in row.items()
            if isinstance(value, Tensor)
        ]
        self._copy = HostCopy([cast("Tensor", row[name]) for row, name in self._places])
        self.is_ready = self._copy.is_ready

    def rows(self) -> list[Delivery]:
        """Gives the rows with numbers in the place of tensors."""
        for (row, name), number in zip(self._places, self._copy.numbers(), strict=True):
            row[name] = number
        return cast("list[Delivery]", self._rows)
