"""Logged numbers: kept on the device, copied in one go, handed on when they have arrived."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from eventloop.clock import Clock, Moment, Time

Row = dict[str, float | Tensor]
Delivery = tuple[Moment, dict[str, float]]


class Numbers:
    """The numbers logged and not yet delivered, in rows of one moment each.

    Args:
        interval: how often they are brought to the host.
    """

    def __init__(self, interval: Time) -> None:
        self.interval = interval
        self._row: Row = {}
        self._rows: list[tuple[Moment, Row]] = []
        self._copies: deque[_HostCopy] = deque()

    def record(self, name: str, value: float | Tensor) -> None:
        """Keeps a number for the moment under way; a later one of the same name replaces it.

        Args:
            value: a number, or a detached tensor of one entry that nobody writes into any more.
        """
        self._row[name] = value

    def arrived(self, clock: Clock, *, everything: bool = False) -> Sequence[Delivery]:
        """Ends the moment under way; gives the rows that are on the host by now, in order.

        The copy of the rows so far starts when it is due.

        Args:
            everything: starts the copy of all rows now and waits for it.
        """
        if self._row:
            self._rows.append((clock.moment(), self._row))
            self._row = {}
        if self._rows and (everything or clock.crossed(self.interval)):
            self._copies.append(_HostCopy(self._rows))
            self._rows = []
        rows: list[Delivery] = []
        while self._copies and (everything or self._copies[0].is_ready()):
            rows += self._copies.popleft().rows()
        return rows


class NoNumbers(Numbers):
    """What stands in the place of `Numbers` where no plugin listens: everything is dropped."""

    def record(self, name: str, value: float | Tensor) -> None:
        """Drops a number."""

    def arrived(self, clock: Clock, *, everything: bool = False) -> Sequence[Delivery]:
        """Gives nothing."""
        return ()


class _HostCopy:
    """Rows on their way to the host: one stacked copy a dtype and device."""

    def __init__(self, rows: list[tuple[Moment, Row]]) -> None:
        self._rows = rows
        groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for _, row in rows:
            for value in row.values():
                if isinstance(value, Tensor):
                    groups.setdefault((value.dtype, value.device), []).append(
                        value.reshape(()) if value.ndim else value
                    )
        self._copies = {key: _to_host(torch.stack(values)) for key, values in groups.items()}
        on_gpu = any(device.type == "cuda" for _, device in groups)
        self._done = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        if self._done is not None:
            self._done.record()

    def is_ready(self) -> bool:
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

    def rows(self) -> Iterator[tuple[Moment, dict[str, float]]]:
        if self._done is not None:
            self._done.synchronize()
        numbers = {key: iter(copy.tolist()) for key, copy in self._copies.items()}
        for at, row in self._rows:
            yield (
                at,
                {
                    name: next(numbers[value.dtype, value.device])
                    if isinstance(value, Tensor)
                    else value
                    for name, value in row.items()
                },
            )


def _to_host(stacked: Tensor) -> Tensor:
    if stacked.device.type != "cuda":
        return stacked
    pinned = torch.empty_like(stacked, device="cpu", pin_memory=True)
    return pinned.copy_(stacked, non_blocking=True)
