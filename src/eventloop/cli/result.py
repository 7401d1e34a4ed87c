"""`fit --result FILE.json`: what came of a run, for programs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.diagnostics.cost import Cost, peak_memory_bytes
from eventloop.errors import EventloopError
from eventloop.files import disk
from eventloop.plugin.records import FlagPlugin

if TYPE_CHECKING:
    from eventloop.trainer import Result, Trainer

_MOMENT = ("epoch", "batch", "sample", "token", "seconds")


class ResultFile:
    """Measures a run, and writes what came of it.

    Args:
        path: of the file; None for none.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._cost = Cost()

    @property
    def callbacks(self) -> list[object]:
        """The plugins that watch the run."""
        return [FlagPlugin(self._cost, "--result")] if self._path is not None else []

    def write(self, trainer: Trainer, result: Result) -> None:
        """Writes numbers, time a step and memory, on the first rank; all of the file or nothing.

        Raises:
            EventloopError: it can't be written.
        """
        path = self._path
        if path is None or trainer.state.rank != 0:
            return
        content = _content(trainer, result, self._cost)
        text = json.dumps(content, indent=2, allow_nan=False)
        try:
            disk.replace_file(path, f"{text}\n".encode("ascii"))
        except OSError as error:
            raise EventloopError(
                f"the result can't be written to {path}: {error.strerror or error}",
                fix="free space, or give another file",
            ) from error


def _content(trainer: Trainer, result: Result, cost: Cost) -> dict[str, Any]:
    """Returns what is written; a number that isn't finite is null."""
    state = trainer.state
    row = result.history[-1] if result.history else {}
    numbers = {name: value for name, value in row.items() if name not in _MOMENT}
    return {
        "metrics": {
            name: value if math.isfinite(value) else None for name, value in numbers.items()
        },
        "higher_is_better": {name: _is_higher_better(trainer, name) for name in numbers},
        **state.clock.moment()._asdict(),
        "step_s": cost.step_s,
        "peak_memory_bytes": peak_memory_bytes(state.device),
        "stop_reason": state.stop_reason,
        "algorithms": [one.name for one in trainer.plugins if one.role == "algorithm"],
        "off": {one.found.name: one.reason for one in trainer.off},
    }


def _is_higher_better(trainer: Trainer, name: str) -> bool | None:
    """Returns whether higher values are better; None where the metric doesn't say."""
    if name == "train/loss":
        return False
    known = {
        f"{dataset}/{metric}": one
        for dataset, several in trainer.state.metrics.items()
        for metric, one in several.items()
    }
    # One metric may give several numbers, with dotted names.
    found = known.get(name, known.get(name.partition(".")[0]))
    return None if found is None else found.higher_is_better
