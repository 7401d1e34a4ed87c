"""The runs of an ablation: variants with and without algorithms, each with every seed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eventloop.cli.ablate.request import Ablation
from eventloop.options import flag
from eventloop.plugin.load import Loaded
from eventloop.plugin.records import fold

NONE, ALL = "none", "all"


@dataclass(frozen=True)
class Variant:
    """A choice of algorithms.

    Args:
        name: "none", "all", "without ema"; where there is one algorithm, its name.
        algorithms: the names of those that take part.
    """

    name: str
    algorithms: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """A variant that is trained with a seed.

    Args:
        argv: what follows `eventloop`; without folder and result.
    """

    variant: Variant
    seed: int
    argv: tuple[str, ...]

    @property
    def place(self) -> Path:
        """Its folder in that of the ablation."""
        return Path(self.variant.name.replace(" ", "-"), f"seed-{self.seed}")

    def __str__(self) -> str:
        return f"{self.variant.name}, seed {self.seed}"


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Args:
        content: what `fit --result` wrote; None where it failed.
        reason: why it failed.
        log: what it wrote to the terminal, as a file.
    """

    run: Run
    content: Mapping[str, Any] | None
    reason: str
    log: Path


def variants_of(names: tuple[str, ...]) -> tuple[Variant, ...]:
    """Gives the variants of some algorithms, in the order of the table's rows."""
    none = Variant(NONE, ())
    if len(names) == 1:
        return (none, Variant(names[0], names))
    without = (
        Variant(f"without {name}", tuple(one for one in names if one != name)) for name in names
    )
    return (none, Variant(ALL, names), *without)


def runs_of(ablation: Ablation) -> list[Run]:
    """Gives all runs, a seed after the other, so that each seed's are compared side by side."""
    return [
        Run(variant, seed, (*fit_argv(ablation, variant), f"--seed={seed}"))
        for seed in ablation.seeds
        for variant in variants_of(ablation.names)
    ]


def fit_argv(ablation: Ablation, variant: Variant) -> Iterator[str]:
    """Gives the command line that trains a variant, as it would be typed."""
    arguments = ablation.arguments
    taking_part = set(map(fold, variant.algorithms))
    off = [one for one in ablation.algorithms if fold(one.found.name) not in taking_part]
    # A lock is of all plugins together.
    yield from ("fit", arguments.task, "--unlocked", *ablation.passed())
    yield from _choice(ablation, off)
    silent = {fold(one.found.name) for one in (*off, *ablation.others)}
    for key, value in arguments.flags.items():
        if key.partition(".")[0] not in silent or "." not in key:
            yield f"{flag(key)}={value}"


def _choice(ablation: Ablation, off: Iterable[Loaded]) -> Iterator[str]:
    """Gives the `-p` of a run: those of the command line, but for algorithms that are off."""
    choice = ablation.arguments.choice
    gone = [one.found for one in (*off, *ablation.others)]
    names = {fold(one.name) for one in gone}
    files = {one.entry_point.value for one in gone if one.path is not None}
    yield from (f"-p{name}" for name in choice.insist if fold(name) not in names)
    yield from (f"-p{file}" for file in choice.files if file not in files)
    yield from (f"-pno:{name}" for name in choice.off)
    yield from (f"-pno:{one.name}" for one in gone if one.path is None)
    insisted = set(map(fold, choice.insist))
    for one in ablation.kept:
        if one.found.path is None and fold(one.found.name) not in insisted:
            yield f"-p{one.found.name}"
