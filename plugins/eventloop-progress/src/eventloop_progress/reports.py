"""The lines of a log: one for each epoch."""

from __future__ import annotations

from dataclasses import dataclass

from eventloop.toolbox.metric_names import metric_name
from eventloop_progress.text import Results, duration, per_second, short


@dataclass(frozen=True)
class Report:
    """What is known of an epoch when it ends.

    Args:
        position: how far the run is by then: epoch 1/10.
        loss: the mean over the samples of the epoch; None where no batch had one.
        results: of the latest evaluation in it or after it; empty where there was none.
        samples_per_s: in training; None where no batch was trained on.
        seconds: from its start to its report.
    """

    position: str
    loss: float | None
    results: Results
    samples_per_s: float | None
    seconds: float

    def line(self) -> str:
        """Returns the report as a line."""
        parts = [self.position]
        if self.loss is not None:
            parts.append(f"loss {short(self.loss)}")
        parts += [
            f"{metric_name(eval_set, name)} {short(value)}"
            for eval_set, metrics in self.results.items()
            for name, value in metrics.items()
        ]
        if self.samples_per_s is not None:
            parts.append(per_second(self.samples_per_s))
        return "  ".join([*parts, duration(self.seconds)])
