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
        self._losses: dict[int, list[float]] = {}
        self._waiting: list[Report] = []

    def arrived(self, epoch_idx: int, loss: float | None) -> list[str]:
        """Takes the numbers of one moment; gives the lines that are complete by that."""
        if loss is not None:
            self._losses.setdefault(epoch_idx, []).append(loss)
        return self._lines(before=epoch_idx)

    def epoch_end(self, report: Report) -> list[str]:
        """Takes a report; gives its line, unless its losses are still on their way."""
        self._waiting.append(report)
        has_loss = report.epoch_idx in self._losses
        return self._lines(before=report.epoch_idx + 1) if has_loss else []

    def rest(self) -> list[str]:
        """Gives the lines of all reports that wait, with what is known."""
        return self._lines(before=sys.maxsize)

    def _lines(self, before: int) -> list[str]:
        ready = [report for report in self._waiting if report.epoch_idx < before]
        self._waiting = [report for report in self._waiting if report.epoch_idx >= before]
        return [_line(report, self._losses.pop(report.epoch_idx, [])) for report in ready]


def _line(report: Report, losses: list[float]) -> str:
    parts = [report.position]
    if losses:
        parts.append(f"loss {short(sum(losses) / len(losses))}")
    parts += [
        f"{dataset}/{name} {short(value)}"
        for dataset, metrics in report.results.items()
        for name, value in metrics.items()
    ]
    if report.samples_per_s is not None:
        parts.append(per_second(report.samples_per_s))
    return "  ".join([*parts, duration(report.seconds)])
