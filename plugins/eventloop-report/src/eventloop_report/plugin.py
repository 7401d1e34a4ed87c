"""The plugin: records numbers and phases during the run, and writes the page at its end."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop import Moment, PluginError, hookimpl
from eventloop.toolbox import RunFolder, as_option, status_of, switch_off, why_no_file
from eventloop_report import facts
from eventloop_report.page import Page, Table
from eventloop_report.series import Numbers, Series
from eventloop_report.texts import Texts

if TYPE_CHECKING:
    from eventloop import StateView

THROUGHPUT = "samples a second"
_PHASES = ("waiting for train data", "training", "evaluation", "everything else")


class Report:
    """Writes a page with the plots of the run: report.html, and a PNG of each plot.

    The page is one file that needs nothing else; it is written when a fit ends, also by a stop or
    a failure. A resumed run's page covers the whole run.

    Args:
        path: the page; not set: report.html in the folder of the run. The PNGs are in a folder
            beside it with the page's name, without `.html`.
        pngs: whether each plot is written as a PNG, too.

    Raises:
        ValueError: the page's name doesn't end in `.html`.
    """

    needs_eval_data = True

    def __init__(self, *, path: Path | None = None, pngs: bool = True) -> None:
        self.path = None if path is None else Path(path)
        if self.path is not None and self.path.suffix != ".html":
            raise ValueError(f"path={str(path)!r} is not a page; its name ends in .html")
        self.pngs = pngs
        self._numbers = Numbers()
        self._throughput = Series()
        self._texts = Texts()
        self._seconds = dict.fromkeys(_PHASES, 0.0)
        self._previous: Moment | None = None
        self._page: Path | None = None
        self._folder: RunFolder | None = None
        self._phase = _PHASES[-1]
        self._since: float | None = None
        self._in_epoch = False

    @hookimpl(rank_zero=True)
    def after_load(self, state: StateView) -> None:
        """Settles where the page goes, for a task may change the working directory."""
        path = state.run_dir / "report.html" if self.path is None else self.path.expanduser()
        self._page = path.absolute()
        self._folder = RunFolder(self._page.parent) if self.path is None else None

    @hookimpl(rank_zero=True)
    def fit_start(self, state: StateView) -> None:
        """Begins to take the time.

        Raises:
            PluginError: nothing can be written there, which a run shouldn't learn at its end.
        """
        assert self._page is not None
        if self._folder is not None:  # it may be a stranger's
            self._folder.check(self._page.name)
            self._folder.names(self._page.stem)
        if reason := why_no_file(self._page):
            raise self._unwritable(reason)
        self._since = time.perf_counter()
        self._phase = "everything else"

    @hookimpl(rank_zero=True)
    def epoch_start(self, state: StateView) -> None:
        """Takes the time: a loader without a length is asked for its first batch."""
        self._in_epoch = True
        self._enter(_PHASES[0])

    @hookimpl
    def should_stop(self, state: StateView) -> None:
        """Starts the phase of waiting for data, in an epoch; never asks for a stop."""
        if self._in_epoch:  # on rank 0
            self._enter(_PHASES[0])

    @hookimpl(rank_zero=True)
    def epoch_end(self, state: StateView) -> None:
        """Starts the phase between steps."""
        self._in_epoch = False
        self._enter("everything else")

    @hookimpl(rank_zero=True)
    def after_dataloader(self, state: StateView) -> None:
        """Starts the phase of training."""
        self._enter("training")

    @hookimpl(rank_zero=True)
    def batch_end(self, state: StateView) -> None:
        """Starts the phase between steps."""
        self._enter("everything else")

    @hookimpl(rank_zero=True)
    def eval_before_all(self, state: StateView) -> None:
        """Starts the phase of evaluation."""
        self._enter("evaluation")

    @hookimpl(rank_zero=True)
    def eval_start(self, state: StateView) -> None:
        """Starts the phase of waiting for the set's first batch."""
        self._enter(f"waiting for {state.eval_name}")

    @hookimpl(rank_zero=True)
    def eval_batch_start(self, state: StateView) -> None:
        """Starts the phase of evaluation."""
        self._enter("evaluation")

    @hookimpl(rank_zero=True)
    def eval_batch_end(self, state: StateView) -> None:
        """Starts the phase of waiting for the set's next batch."""
        self._enter(f"waiting for {state.eval_name}")

    @hookimpl(rank_zero=True)
    def eval_end(self, state: StateView) -> None:
        """Starts the phase between steps."""
        self._enter("evaluation")

    @hookimpl(rank_zero=True)
    def eval_after_all(self, state: StateView) -> None:
        """Takes the time."""
        self._enter("everything else")

    @hookimpl(rank_zero=True)
    def log(self, state: StateView, numbers: dict[str, float], at: Moment) -> None:
        """Keeps the numbers, and how fast the samples went by."""
        for name, value in numbers.items():
            self._numbers.add(name, at.batch, _float(value))
        previous = self._previous
        self._previous = at
        if previous is not None and at.batch > previous.batch and at.seconds > previous.seconds:
            speed = (at.sample - previous.sample) / (at.seconds - previous.seconds)
            self._throughput.add(at.batch, speed)

    @hookimpl(rank_zero=True)
    def log_text(
        self, state: StateView, texts: dict[str, str | dict[str, list[Any]]], at: Moment
    ) -> None:
        """Keeps the latest of each name."""
        for name, text in texts.items():
            self._texts.add(name, at.batch, text)

    @hookimpl(rank_zero=True)
    def fit_end(self, state: StateView) -> None:
        """Writes the page."""
        self._enter("everything else")
        self._since = None
        reason = state.stop_reason
        outcome = reason or "finished"
        is_pruned = status_of(reason) == "pruned"
        self._write(state, outcome if is_pruned or reason is None else f"stopped: {outcome}")

    @hookimpl(rank_zero=True)
    def exception(self, state: StateView, error: BaseException) -> None:
        """Writes the page of a fit that failed; nothing is written for a failure before the fit."""
        if self._since is not None:
            self._enter("everything else")
            self._since = None
            self._write(state, f"failed: {type(error).__name__}: {error}", failed=True)

    def state_dict(self) -> dict[str, Any]:
        """Returns the numbers, texts and times recorded so far."""
        return {
            "of_this_run": {
                "seconds": dict(self._seconds),
                "previous": None if self._previous is None else list(self._previous),
                "throughput": self._throughput.state_dict(),
            },
            "numbers": self._numbers.state_dict(),
            "texts": self._texts.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], version: str) -> None:
        """Restores a state from `state_dict`."""
        self._numbers.load_state_dict(state["numbers"])
        if "texts" in state:  # older checkpoints have none
            self._texts.load_state_dict(state["texts"])
        # In older checkpoints the throughput is one of the numbers, and nothing is apart.
        self._throughput = self._numbers.by_name.pop(THROUGHPUT, Series())
        of_this_run = state.get("of_this_run", state)
        if "throughput" in of_this_run:
            self._throughput.load_state_dict(of_this_run["throughput"])
        self._seconds = dict(of_this_run["seconds"])
        if "waiting for data" in self._seconds:  # as older checkpoints call it
            self._seconds = {_PHASES[0]: self._seconds.pop("waiting for data"), **self._seconds}
        previous = of_this_run["previous"]
        self._previous = None if previous is None else Moment(*previous)

    def _enter(self, phase: str) -> None:
        """Adds the time since the last phase began to it."""
        if self._since is not None:
            now_s = time.perf_counter()
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now_s - self._since
            self._since = now_s
            self._phase = phase

    def _write(self, state: StateView, status: str, *, failed: bool = False) -> None:
        # Takes a second to import, which a run needn't wait for at its start.
        from eventloop_report.figures import MAX_PLOTS, Drawing, file_names, plots_of

        assert self._page is not None
        series = dict(self._numbers.by_name)
        if self._throughput.num_values:
            series[THROUGHPUT] = self._throughput
        plots = plots_of(series, state.eval_dataloaders)
        note = _left_out(len(plots) - MAX_PLOTS, "plots", self._numbers.num_left_out)
        plots = plots[:MAX_PLOTS]
        drawings = dict(zip(file_names(plots), map(Drawing, plots), strict=True))
        page = Page(
            title=state.run_dir.name,
            status=status,
            failed=failed,
            plots={name: one.svg() for name, one in drawings.items()},
            tables=(
                Table("Run", list(facts.about(state))),
                facts.results(series),
                *self._texts.tables(),
                facts.phases(self._seconds),
                facts.plugin_costs(state),
            ),
            note=note,
        )
        try:
            self._put(self._page.name, page.html().encode("utf-8"))
            if self.pngs:
                for name, one in drawings.items():
                    self._put(f"{self._page.stem}/{name}.png", one.png())
        except OSError as error:
            raise self._unwritable(error.strerror or str(error)) from error

    def _put(self, name: str, data: bytes) -> None:
        """Writes the page, or a file next to it."""
        assert self._page is not None
        if self._folder is not None:
            self._folder.write(name, data)
            return
        path = self._page.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def _unwritable(self, reason: str) -> PluginError:
        return PluginError(
            f"the report can't be written to {self._page}: {reason}",
            fix="free space or give another file with "
            + as_option("report", path="FILE.html")
            + ", or switch "
            "the plugin off with " + switch_off("report"),
        )


def _left_out(num_plots: int, kind: str, num_names: int) -> str:
    """Returns a note on what the page leaves out; "" if it leaves out nothing."""
    notes = []
    if num_plots > 0:
        notes.append(f"{num_plots} more {kind} aren't drawn")
    if num_names:
        notes.append(f"the numbers of {num_names} more names weren't kept")
    return "; ".join(notes)


def _float(value: float) -> float:
    """Returns an integer that is too large for a float as an infinity, which is drawn as a gap."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
