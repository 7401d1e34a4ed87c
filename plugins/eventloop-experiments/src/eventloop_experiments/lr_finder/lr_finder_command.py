"""`eventloop lr-finder`: proposes a learning rate, from a short run in which it grows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from eventloop import EventloopError
from eventloop.commands import (
    FAILURE,
    FIT_OPTIONS,
    Arguments,
    Command,
    CommandOption,
    UsageError,
    prepare,
    run_command,
    write_json,
    write_lines,
)
from eventloop_experiments.lr_finder.curve import Curve, Proposal
from eventloop_experiments.lr_finder.curve_picture import draw
from eventloop_experiments.runs import RunProcesses, RunsFolder, fit_argv, plot_path, refuse_own

COMMAND = Command(
    "lr-finder",
    "Proposes a learning rate: trains for some batches with one that grows, in a folder that is "
    "removed afterwards, and looks where the loss falls fastest. Everything else is as for "
    "`eventloop fit`; no run of yours is touched.",
    (
        CommandOption("low", "RATE", "the first learning rate; 1e-6 unless given"),
        CommandOption("high", "RATE", "the last learning rate; 10 unless given"),
        CommandOption("steps", "N", "number of batches; 200 unless given"),
        CommandOption("plot", "FILE.png", "draw the loss over the rate; needs matplotlib"),
        CommandOption("json", "", "write JSON instead of text"),
        *FIT_OPTIONS,
    ),
)
_OWN = ("run_dir", "resume", "max_duration", "eval_interval", "checkpoint_interval")


@dataclass(frozen=True)
class _Run:
    """The only run of a temporary folder of runs."""

    argv: tuple[str, ...]
    place: Path = Path("run")

    def __str__(self) -> str:
        return "the run"


def run(argv: Sequence[str]) -> int:
    """Runs the command."""
    return run_command(COMMAND, _run, argv)


def _run(arguments: Arguments) -> int:
    plot = plot_path(arguments, "eventloop-experiments")
    curve = _trained(arguments, _curve(arguments))
    proposal = curve.proposal()
    if "json" in arguments.given:
        proposed_rates = None if proposal is None else proposal._asdict()
        losses = [loss if math.isfinite(loss) else None for loss in curve.losses]
        write_json({"proposal": proposed_rates, "rates": curve.rates, "losses": losses})
    else:
        write_lines(_lines(curve, proposal))
    if plot is not None:
        draw(curve, proposal, plot)
    return FAILURE if proposal is None else 0


def _curve(arguments: Arguments) -> Curve:
    """Reads the range of learning rates.

    Raises:
        UsageError: they aren't positive numbers, or the first isn't less than the last.
    """
    refuse_own(arguments, _OWN)
    rates = []
    for name, default in (("low", "1e-6"), ("high", "10")):
        text = arguments.given.get(name, default)
        try:
            rates.append(float(text))
        except ValueError:
            rates.append(math.nan)
        if not 0 < rates[-1] < math.inf:
            raise UsageError(
                f"--{name} {text} is not a learning rate", fix=f"write `--{name} {default}`"
            )
    if rates[0] >= rates[1]:
        raise UsageError(
            f"--low {rates[0]} isn't less than --high {rates[1]}", fix="write `--low 1e-6`"
        )
    return Curve(rates[0], rates[1], arguments.count("steps", 200))


def _trained(arguments: Arguments, curve: Curve) -> Curve:
    """Trains in a temporary folder.

    Raises:
        EventloopError: the run fails.
        KeyboardInterrupt, Terminated: a signal was received.
    """
    prepare(arguments, COMMAND)
    with TemporaryDirectory(prefix="eventloop-lr-finder-") as name:
        out = Path(name, "curve.json")
        argv = [
            *fit_argv(arguments),
            "-peventloop_experiments.lr_finder.finder:LrFinder",
            f"--lr-finder.low={curve.low!r}",
            f"--lr-finder.high={curve.high!r}",
            f"--lr-finder.steps={curve.num_steps}",
            f"--lr-finder.out={out}",
            f"--max-duration={curve.num_steps}ba",
            "--eval-interval=none",
            "--checkpoint-interval=none",
            "--on-bad-loss=ignore",
            "--log-interval=1ba",
        ]
        folder = RunsFolder(Path(name), "lr-finder")
        processes = RunProcesses[_Run](folder)
        with processes:
            outcomes = list(processes.outcomes([_Run(tuple(argv))]))
        if not outcomes:
            raise processes.stopped("no learning rate is proposed")
        # An exploded loss may fail the run after the curve was written.
        if not out.exists():
            raise EventloopError(
                f"the run failed: {outcomes[0].reason}",
                fix=f"see that `eventloop fit {arguments.task} --dry-run` works",
            )
        content = json.loads(out.read_text(encoding="ascii"))
    curve.rates = content["rates"]
    curve.losses = content["losses"]
    return curve


def _lines(curve: Curve, proposal: Proposal | None) -> Iterator[str]:
    tried = f"{len(curve.rates)} batches, from {curve.low:g} to {max(curve.rates, default=0):.3g}"
    if proposal is None:
        yield f"no learning rate is proposed: the loss doesn't fall in {tried}"
        yield "try a lower `--low`, or more `--steps`"
        return
    yield f"learning rate: {proposal.steepest:.2g}, where the loss falls fastest"
    yield f"lowest loss at {proposal.lowest:.2g}; {tried}"
