"""A line for each epoch, printed when its losses are there."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from eventloop_progress.text import Results, duration, per_second, short


@dataclass(frozen=True)
class Report:
    """What is known of an epoch when it ends.

    Args:
        epoch_idx: its number from 0, by which its losses are found.
        position: how far the run is by then: epoch 1/10.
        results: of the latest evaluation in it or after it; empty where there was none.
        samples_per_s: in training; None where no batch was trained on.
        seconds: from its start to its report.
    """

    epoch_idx: int
    position: str
    results: Results
    samples_per_s: float | None
    seconds: float


class Reports:
    """Joins reports with the losses that are delivered a few batches later.

    An epoch is reported at once, with the mean of its losses that have arrived. One so short that
    none has is reported as soon as they have.
    """

    def __init__(self) -> None:
        self._losses: dict[int, tuple[float, int]] = {}
        self._waiting: list[Report] = []

    def arrived(self, epoch_idx: int, loss: float | None) -> list[str]:
        """Takes the numbers of one moment; gives the lines that are complete by that."""
        lines = self._lines(before=epoch_idx)
        if loss is not None:
            total, count = self._losses.get(epoch_idx, (0.0, 0))
            self._losses[epoch_idx] = (total + loss, count + 1)
        return lines

    def epoch_end(self, report: Report) -> list[str]:
        """Takes a report; gives its line, unless its losses are still on their way."""
        self._waiting.append(report)
        has_loss = report.epoch_idx in self._losses
        return self._lines(before=report.epoch_idx + 1) if has_loss else []

    def rest(self) -> list[str]:
        """Returns the lines of all reports that wait, with what is known."""
        return self._lines(before=sys.maxsize)

    def _lines(self, before: int) -> list[str]:
        ready = [report for report in self._waiting if report.epoch_idx < before]
        lines = [_line(report, *self._losses.get(report.epoch_idx, (0.0, 0))) for report in ready]
        self._waiting = [report for report in self._waiting if report.epoch_idx >= before]
        self._losses = {idx: loss for idx, loss in self._losses.items() if idx >= before}
        return lines


def _line(report: Report, total: float, count: int) -> str:
    parts = [report.position]
    if count:
        parts.append(f"loss {short(total / count)}")
    parts += [
        f"{dataset}/{name} {short(value)}"
        for dataset, metrics in report.results.items()
        for name, value in metrics.items()
    ]
    if report.samples_per_s is not None:
        parts.append(per_second(report.samples_per_s))
    return "  ".join([*parts, duration(report.seconds)])
