"""The runs of an ablation: variants with and without algorithms, each with every seed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eventloop.commands import flag, fold
from eventloop_experiments.ablate.ablation_request import Ablation
from eventloop_experiments.ablate.variants import Variant
from eventloop_experiments.runs import Outcome, fit_argv


@dataclass(frozen=True)
class Run:
    """A variant that is trained with a seed.

    Args:
        argv: arguments of `eventloop`, without `--run-dir` and `--result`.
    """

    variant: Variant
    seed: int
    argv: tuple[str, ...]

    @property
    def place(self) -> Path:
        """Its folder, relative to the folder of the ablation."""
        return Path(self.variant.place, f"seed-{self.seed}")

    def __str__(self) -> str:
        return f"{self.variant.name}, seed {self.seed}"


AblationOutcome = Outcome[Run]


def runs_of(ablation: Ablation) -> list[Run]:
    """Returns all runs, seed by seed, so that an interrupted ablation has complete comparisons."""
    return [
        Run(variant, seed, (*fit_line(ablation, variant), f"--seed={seed}"))
        for seed in ablation.seeds
        for variant in ablation.variants
    ]


def fit_line(ablation: Ablation, variant: Variant) -> list[str]:
    """Returns the command line that trains a variant, as it would be typed."""
    taking_part = set(map(fold, variant.algorithms))
    off = [plugin for plugin in ablation.algorithms if fold(plugin.name) not in taking_part]
    insisted = set(map(fold, ablation.arguments.choice.insist))
    always_on = [
        plugin.name
        for plugin in ablation.always_on
        if not plugin.by_flag and fold(plugin.name) not in insisted
    ]
    without = (*off, *ablation.always_off)
    return [
        *fit_argv(ablation.arguments, without=without),
        *(f"-p{name}" for name in always_on),
        *(f"{flag(key)}={text}" for key, text in variant.options),
    ]
