"""Living together: every pair of plugin packages in one environment.

Each pair of the packages in plugins/, installed one after the other, trains a tiny task of images; or
of texts, or on two ranks, where one of the two has no part in that. The run is compared bit by bit, weights and
numbers, with one that was installed in the other order, and with one that is broken off in the middle
of an epoch and resumed with everything built anew. What can't work together has to say so itself:

    .  trains, whatever the order of installation, and is resumed to the same bits
    x  refused before training, by a rule that names both
    o  one of the two has no part in this environment, and says why
    F  none of this: exit status 1

    python benchmarks/pairs.py [--only mixup ema ...] [--jobs 2] [--plugins DIR] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import json
import multiprocessing
import os
import re
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent))  # for processes that are spawned

from pairs_tasks import KINDS, OPTIONS, StoppedError, Stops

from eventloop import EventloopError, Trainer, TrainerBuilder
from eventloop.config.configuration import Configuration
from eventloop.naming import fold
from eventloop.plugin.records import GROUPS
from eventloop_testing import run_ranks

PLUGINS = Path(__file__).parents[1] / "plugins"
MARKS = {"trains": ".", "refused": "x", "no part": "o", "fails": "F"}
_DURATION = "3ep"


@dataclass(frozen=True)
class Package:
    """A plugin package as its pyproject.toml tells of it."""

    name: str
    distribution: str
    version: str
    group: str
    target: str
    source: str


@dataclass(frozen=True)
class Verdict:
    """What came of a pair; of a package alone, where both are one.

    Args:
        kind: of the task that it was decided on.
        verdict: one of `MARKS`.
        message: the rule or the reason.
    """

    first: str
    second: str
    kind: str
    verdict: str
    message: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a run ends with."""

    weights: dict[str, Tensor]
    history: list[dict[str, float]]


def packages_in(folder: Path) -> list[Package]:
    """Reads the packages of a folder, once for each plugin that they have, sorted by folder.

    A package without a plugin, such as a command or a storage, takes part in no training by itself.
    """
    packages = []
    for path in sorted(folder.glob("*/pyproject.toml")):
        project = tomllib.loads(path.read_text())["project"]
        source = str(path.parent / "src")
        for group, points in project.get("entry-points", {}).items():
            if group not in GROUPS:
                continue
            for name, target in points.items():
                package = Package(name, project["name"], project["version"], group, target, source)
                packages.append(package)
    return packages


def judge(first: Package, second: Package) -> Verdict:
    """Trains a pair on images; where one has no part in them on texts, then on two ranks."""
    with tempfile.TemporaryDirectory(prefix="pairs-") as folder, _quiet():
        verdict = _judged_on("images", first, second, Path(folder, "images"))
        if verdict.verdict != "no part":
            return verdict
        on_texts = _judged_on("texts", first, second, Path(folder, "texts"))
        if on_texts.verdict != "no part":
            return on_texts
        ranks = run_ranks(_judged_on, "images", first, second, Path(folder, "ranks"))
        on_ranks = min(ranks, key=lambda one: one.verdict != "fails")
        if on_ranks.verdict != "no part":
            return replace(on_ranks, kind="images, 2 ranks")
        told = dict.fromkeys(one.message for one in (verdict, on_texts, on_ranks))
        return replace(verdict, message="; ".join(told))


def _judged_on(kind: str, first: Package, second: Package, folder: Path) -> Verdict:
    def verdict(what: str, message: str = "") -> Verdict:
        return Verdict(first.name, second.name, kind, what, message)

    pair = list(dict.fromkeys([first, second]))
    try:
        with installed(pair, folder / "one"), trainer(pair, kind, folder / "one") as built:
            if told := _off(built, pair):
                return verdict("no part", told)
            whole = outcome_of(built)
    except EventloopError as error:
        # A rule of the two names both; what one alone can't do is not a matter of the pair.
        is_rule = len(pair) == 2 and all(is_named(one, str(error)) for one in pair)
        return verdict("refused" if is_rule else "fails", str(error))
    except Exception as error:  # noqa: BLE001 - a plugin may do anything
        return verdict("fails", f"{type(error).__name__}: {error}")
    try:
        turned = _in_one_go(pair[::-1], kind, folder / "two")
        resumed = _resumed(pair, kind, folder / "three")
    except Exception as error:  # noqa: BLE001
        return verdict("fails", f"it trains once, then: {type(error).__name__}: {error}")
    if difference := differing(whole, turned):
        return verdict("fails", f"installed in the other order: {difference}")
    if difference := differing(whole, resumed):
        return verdict("fails", f"resumed: {difference}")
    return verdict("trains")


def _off(built: Trainer, pair: Sequence[Package]) -> str:
    """Says which of a pair have no part, and why."""
    names = {fold(one.name) for one in pair}
    off = [one for one in built.off if fold(one.name) in names]
    return "; ".join(f"{one.name} is off: {one.reason}" for one in off)


def _in_one_go(pair: Sequence[Package], kind: str, folder: Path) -> Outcome:
    with installed(pair, folder), trainer(pair, kind, folder) as built:
        return outcome_of(built)


def _resumed(pair: Sequence[Package], kind: str, folder: Path) -> Outcome:
    stops = Stops()
    with installed(pair, folder):
        with (
            contextlib.suppress(StoppedError),
            trainer(pair, kind, folder, callbacks=[stops]) as built,
        ):
            built.fit()
        with trainer(pair, kind, folder) as built:
            if built.state.clock.batch != stops.batch:
                raise RuntimeError(f"it goes on from {built.state.clock.batch}, not {stops.batch}")
            return outcome_of(built)


@contextlib.contextmanager
def installed(packages: Sequence[Package], folder: Path) -> Iterator[None]:
    """Installs packages one after the other: what was installed first is found first."""
    kept = list(sys.path)
    sites = []
    by_distribution: dict[tuple[str, str], list[Package]] = {}
    for package in packages:
        by_distribution.setdefault((package.distribution, package.version), []).append(package)
    for idx, ((name, version), plugins) in enumerate(by_distribution.items()):
        info = _of_rank(folder) / f"site-{idx}" / f"{fold(name)}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        points: dict[str, list[str]] = {}
        for plugin in plugins:
            points.setdefault(plugin.group, []).append(f"{plugin.name} = {plugin.target}")
        sections = ["\n".join([f"[{group}]", *lines]) for group, lines in points.items()]
        (info / "entry_points.txt").write_text("\n".join(sections) + "\n")
        (info / "REQUESTED").touch()
        sites.append(str(info.parent))
    sys.path[:0] = [*sites, *(one.source for one in packages)]
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = kept


def trainer(
    packages: Sequence[Package],
    kind: str,
    folder: Path,
    callbacks: Sequence[object] = (),
    algorithms: Sequence[object] = (),
    **given: object,
) -> Trainer:
    """Builds a trainer in an environment where these packages are all that there is.

    Args:
        given: settings.
    """
    taken = [one.name for one in packages]
    place = _of_rank(folder)
    (place / "pyproject.toml").write_text(f"[tool.eventloop]\nallow = {json.dumps(taken)}\n")
    names = set(map(fold, taken))
    options = {key: one for key, one in OPTIONS.items() if key.partition(".")[0] in names}
    settings = {
        "max_duration": _DURATION,
        "device": "cpu",
        "run_dir": folder / "run",
        "checkpoint_interval": None,
    }
    flags = {**settings, **options, **given}
    configuration = Configuration.read(flags, environ={}, directory=place)
    return TrainerBuilder(configuration).build(
        KINDS[kind](), algorithms=algorithms, callbacks=callbacks
    )


def outcome_of(built: Trainer) -> Outcome:
    """Trains; gives what it ends with. Seconds differ from run to run."""
    result = built.fit()
    model = built.state.model
    # Of buffers those of rank 0 count: evaluation and files take them.
    tensors = dict(model.named_parameters()) if built.state.rank else model.state_dict()
    weights = {name: _own(one.detach()) for name, one in tensors.items()}
    history = [{key: row[key] for key in row if key != "seconds"} for row in result.history]
    return Outcome(weights, history)


def _own(tensor: Tensor) -> Tensor:
    """Returns a copy of a tensor, or of this rank's part of it."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def _of_rank(folder: Path) -> Path:
    return folder / f"rank-{os.environ.get('RANK', '0')}"


def differing(one: Outcome, other: Outcome) -> str:
    """Says in what two outcomes differ; "" where they are the same bits."""
    for name, tensor in one.weights.items():
        if not torch.equal(tensor, other.weights[name]):
            return f"{name} is another after {one.history[-1]['batch']} batches"
    for row, another in itertools.zip_longest(one.history, other.history):
        if row != another:
            return f"{row} became {another}"
    return ""


def is_named(package: Package, text: str) -> bool:
    """Returns whether a text names a package."""
    return re.search(rf"(?<![\w-]){re.escape(package.name)}(?![\w-])", text) is not None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leaves out what plugins print, and what they leave in the working directory."""
    with (
        tempfile.TemporaryDirectory(prefix="pairs-") as folder,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def matrix(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yields the lines of the matrix; a package alone stands on the diagonal."""
    marks = {frozenset({one.first, one.second}): MARKS[one.verdict] for one in verdicts}
    names = sorted({name for one in verdicts for name in (one.first, one.second)})
    width = max(map(len, names))
    for idx, name in enumerate(names):
        row = " ".join(f"{marks.get(frozenset({name, one}), ' '):>2}" for one in names[: idx + 1])
        yield f"{idx + 1:>2} {name:<{width}} {row}"
    yield f"{'':<{width + 4}}" + " ".join(f"{idx + 1:>2}" for idx, _ in enumerate(names))


def main() -> int:
    """Judges, and writes the matrix and the reasons."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plugins", type=Path, default=PLUGINS, help="folder of the packages")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="pairs with one of these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many processes")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    packages = packages_in(given.plugins.resolve())
    names = [one.name for one in packages]
    if unknown := sorted({*(given.only or ())} - {*names}):
        parser.error(f"no package is named {', '.join(unknown)}; there are {', '.join(names)}")
    pairs = [
        pair
        for pair in itertools.combinations_with_replacement(packages, 2)
        if given.only is None or any(one.name in given.only for one in pair)
    ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        given.jobs, context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        verdicts = list(pool.map(judge, *zip(*pairs, strict=True)))
    if given.json:
        print(json.dumps([asdict(one) for one in verdicts], indent=2))
    else:
        write(verdicts)
    return int(any(one.verdict == "fails" for one in verdicts))


def write(verdicts: Sequence[Verdict]) -> None:
    """Writes the matrix, and below it what isn't "trains"."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for line in matrix(verdicts):
        console.print(line)
    for what, mark in MARKS.items():
        found = [one for one in verdicts if one.verdict == what]
        console.print(f"\n{mark}  {what}: {len(found)} of {len(verdicts)}")
        for one in found if what != "trains" else ():
            who = one.first if one.first == one.second else f"{one.first} + {one.second}"
            console.print(f"{who} ({one.kind}): {one.message}")


if __name__ == "__main__":
    sys.exit(main())
