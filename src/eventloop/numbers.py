"""Logged numbers: kept on the device, copied in one go, handed on when they have arrived."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from eventloop.clock import Clock, Moment, Time

Row = dict[str, float | Tensor]


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
            value: a number, or a tensor of one entry, copied on its device.

        Raises:
            TypeError: something else.
        """
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise TypeError(
                    f"log({name!r}, ...) takes one number, not a tensor of shape "
                    f"{tuple(value.shape)}"
                )
            value = value.detach().clone()
        elif not isinstance(value, (int, float)):
            raise TypeError(f"log({name!r}, ...) takes a number, not {type(value).__name__}")
        self._row[name] = value

    def seal(self, clock: Clock) -> None:
        """Ends the row of the moment under way, which is the clock's."""
        if self._row:
            self._rows.append((clock.moment(), self._row))
            self._row = {}

    def is_due(self, clock: Clock) -> bool:
        """Tells whether it is time to bring the numbers to the host."""
        return bool(self._rows) and clock.crossed(self.interval)

    def start_copy(self) -> None:
        """Starts to copy all sealed rows to the host; waits for nothing."""
        if self._rows:
            self._copies.append(_HostCopy(self._rows))
            self._rows = []

    def arrived(self, *, wait: bool = False) -> Iterator[tuple[Moment, dict[str, float]]]:
        """Gives the rows that are on the host by now, in order.

        Args:
            wait: waits for all copies that were started.
        """
        while self._copies and (wait or self._copies[0].is_ready()):
            yield from self._copies.popleft().rows()


class NoNumbers(Numbers):
    """What stands in the place of `Numbers` where no plugin listens: everything is dropped."""

    def record(self, name: str, value: float | Tensor) -> None:
        """Drops a number."""


class _HostCopy:
    """Rows on their way to the host: one stacked copy a dtype and device."""

    def __init__(self, rows: list[tuple[Moment, Row]]) -> None:
        self._rows = rows
        groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for _, row in rows:
            for value in row.values():
                if isinstance(value, Tensor):
                    groups.setdefault((value.dtype, value.device), []).append(value.reshape(()))
        self._copies = {key: _to_host(torch.stack(values)) for key, values in groups.items()}
        self._done = torch.cuda.Event() if any(key[1].type == "cuda" for key in groups) else None
        if self._done is not None:
            self._done.record()

    def is_ready(self) -> bool:
        return self._done is None or self._done.query()

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
