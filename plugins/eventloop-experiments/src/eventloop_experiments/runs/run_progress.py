"""Progress of the runs: a line per run, and on a terminal a bar below the lines."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, Self

from eventloop.commands import one_line
from eventloop_experiments.runs.runs_folder import Outcome, R

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


class RunProgress(Generic[R]):
    """Shows runs as they begin and end, inside its context.

    Args:
        num_runs: total number of runs.
        num_done: number of runs that are done already.
    """

    def __init__(self, num_runs: int, num_done: int) -> None:
        self._num_runs = num_runs
        self._num_done = num_done
        self._under_way: list[R] = []
        self._bar = _bar(num_runs, num_done) if sys.stdout.isatty() else None

    def started(self, runs: Iterable[R]) -> Iterator[R]:
        """Yields the runs, and shows each when it is started."""
        for run in runs:
            self._under_way.append(run)
            self._show()
            yield run

    def ended(self, outcome: Outcome[R], num_done: int | None = None, mark: str = "") -> None:
        """Shows the outcome of a run.

        Args:
            num_done: number of runs that are done, if other processes contribute to it.
            mark: further remark on the outcome: "pruned".
        """
        self._under_way.remove(outcome.run)
        self._num_done = self._num_done + 1 if num_done is None else num_done
        line = (
            f"{self._num_done}/{self._num_runs}  {_summary(outcome, mark)}  {outcome.seconds:.1f} s"
        )
        if self._bar is None:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
        else:
            self._bar.console.print(line, markup=False, highlight=False)
        self._show()

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _show(self) -> None:
        if self._bar is not None:
            text = "; ".join(map(str, self._under_way))
            self._bar.update(self._bar.task_ids[0], completed=self._num_done, description=text)


def _summary(outcome: Outcome[Any], mark: str) -> str:
    if outcome.content is None:
        return f"{outcome.run}: failed: {outcome.reason}"
    metrics = outcome.content["metrics"]
    shown = {name: value for name, value in metrics.items() if not name.startswith("train/")}
    numbers = (
        f"{one_line(name)} {'nan' if value is None else format(value, '.4g')}"
        for name, value in (shown or metrics).items()
    )
    marked = f"{mark}, " if mark not in ("", "complete", "failed") else ""
    return f"{outcome.run}: {marked}{', '.join(numbers)}"


def _bar(num_runs: int, num_done: int) -> Bar:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        transient=True,
    )
    bar.add_task("", total=num_runs, completed=num_done)
    return bar
