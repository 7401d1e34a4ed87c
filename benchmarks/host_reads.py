"""Host reads: how often a step of each plugin waits for the device, on the pretend accelerator.

Each package of plugins/ trains the tiny task of `pairs.py` alone: of images, or of texts where it has
no part in that. A wait is what a GPU's host would wait at: `item`, `bool`, `tolist`, `.cpu()`,
`synchronize`, a blocking copy. Those between taking a batch and the end of its step are counted, and
told by the package whose line it is; `eventloop` is the core. The weights are compared with those of
the same run on the CPU, bit by bit.

    python benchmarks/host_reads.py [--only mixup ema ...] [--precision fp16] [--plugins DIR] [--json]
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

from pairs import PLUGINS, Outcome, Package, differing, installed, outcome_of, packages_in, trainer

from eventloop import Trainer, hookimpl
from eventloop.distributed import rank_variables
from eventloop.naming import fold
from eventloop_testing import Wait, counted_waits, pretend_device, run_ranks

KINDS = ("images", "texts")


@dataclass
class Row:
    """What a plugin did on the pretend accelerator.

    Args:
        plugin: its name; "" for a run without one.
        kind: of the task; "" where it has no part in either.
        steps: how many were counted.
        waits: how often they waited, by package and line.
        weights: "same" as on the CPU, or in what they differ.
        problem: why it doesn't train there.
    """

    plugin: str
    kind: str = ""
    steps: int = 0
    waits: dict[str, int] = field(default_factory=dict)
    weights: str = ""
    problem: str = ""


class Window:
    """An algorithm that notes where steps begin and end among the waits.

    Args:
        waits: the list to which each wait is added.
    """

    name = "a-window"  # before the others, so that it encloses all of them

    def __init__(self, waits: list[Wait]) -> None:
        self._waits = waits
        self._start: int | None = None
        self.steps: list[list[Wait]] = []

    @hookimpl(tryfirst=True)
    def after_dataloader(self, state: Any) -> None:
        """Opens it."""
        self._start = len(self._waits)

    @hookimpl(tryfirst=True)
    def batch_checkpoint(self, state: Any) -> None:
        """Closes it."""
        self._close()

    @hookimpl(wrapper=True, tryfirst=True)
    def scheduler_step(self, state: Any, interval: str) -> Any:
        """Closes it; in fp16 the schedulers follow amid the next step."""
        result = yield
        if state.precision.name != "fp16":
            self._close()
        return result

    def _close(self) -> None:
        if self._start is not None:
            self.steps.append(self._waits[self._start :])
            self._start = None


def in_a_fork(package: Package | None, precision: str) -> Row:
    """Trains a plugin, or none, on both devices, in a process that has the pretend one alone."""
    (row,) = run_ranks(_forked, package, precision, world_size=1)
    return row


def row_of(package: Package | None, precision: str) -> Row:
    """Trains a plugin, or none, on both devices."""
    row = Row(package.name if package else "")
    packages = [] if package is None else [package]
    with tempfile.TemporaryDirectory(prefix="host-reads-") as folder, quiet():
        for kind in KINDS:
            try:
                host = _train(packages, kind, Path(folder, kind, "cpu"), "cpu", precision)
                if host is None:
                    continue
                row.kind = kind
                with pretend_device(draws_from_host=True), counted_waits() as waits:
                    window = Window(waits)
                    place = Path(folder, kind, "pretend")
                    there = _train(packages, kind, place, "pretend", precision, window)
            except Exception as error:  # noqa: BLE001 - a plugin may do anything
                row.problem = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                return row
            assert there is not None
            row.steps = len(window.steps)
            seen = collections.Counter(wait for step in window.steps for wait in step)
            row.waits = {_told(one): times for one, times in seen.most_common()}
            row.weights = differing(host, there) or "same"
            return row
    row.problem = "it has no part in these tasks on one rank"
    return row


def _forked(package: Package | None, precision: str) -> Row:
    for name in rank_variables(0, 1, 0):
        os.environ.pop(name, None)
    return row_of(package, precision)


def _told(wait: Wait) -> str:
    file, _, line = wait.where.rpartition(":")
    return f"{wait.plugin}: {wait.how}, {Path(file).name}:{line}"


def _train(
    packages: Sequence[Package],
    kind: str,
    folder: Path,
    device: str,
    precision: str,
    *algorithms: object,
) -> Outcome | None:
    """Trains; returns None where a plugin has no part in the task."""
    settings = {"device": device, "precision": precision}
    (folder / "rank-0").mkdir(parents=True)
    with (
        installed(packages, folder),
        trainer(packages, kind, folder, algorithms=algorithms, **settings) as built,
    ):
        return None if _is_off(built, packages) else _on_host(outcome_of(built))


def _is_off(built: Trainer, packages: Sequence[Package]) -> bool:
    names = {fold(one.name) for one in packages}
    return any(fold(one.name) in names for one in built.off)


def _on_host(outcome: Outcome) -> Outcome:
    return Outcome({name: one.cpu() for name, one in outcome.weights.items()}, outcome.history)


@contextlib.contextmanager
def quiet() -> Any:
    """Leaves out what plugins print and warn."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def main() -> int:
    """Trains all, and writes the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plugins", type=Path, default=PLUGINS, help="folder of the packages")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these plugins")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    packages: list[Package | None] = [None, *packages_in(given.plugins.resolve())]
    if given.only:
        packages = [one for one in packages if one is not None and one.name in given.only]
    rows = [in_a_fork(one, given.precision) for one in packages]
    if given.json:
        print(json.dumps([asdict(one) for one in rows], indent=2))
    else:
        write(rows)
    return int(any(row.waits or row.weights not in ("same", "") for row in rows))


def write(rows: Sequence[Row]) -> None:
    """Writes the table: waits a step by package and line."""
    table = Table("plugin", "task", "waits a step", "by", "weights", box=None)
    for row in rows:
        total = sum(row.waits.values()) / row.steps if row.steps else 0.0
        by = "\n".join(f"{times / row.steps:g} {what}" for what, times in row.waits.items())
        table.add_row(row.plugin or "none", row.kind, f"{total:g}" if row.steps else "",
                      by, row.problem or row.weights)  # fmt: skip
    Console(highlight=False, markup=False, soft_wrap=True).print(table)


if __name__ == "__main__":
    sys.exit(main())
