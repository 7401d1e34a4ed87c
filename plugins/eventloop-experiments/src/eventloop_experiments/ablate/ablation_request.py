"""From a command line to an ablation: which algorithms, seeds and flags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eventloop.commands import (
    FIT_OPTIONS,
    Arguments,
    Command,
    CommandOption,
    Job,
    Plugin,
    UsageError,
    closest,
    flag,
    fold,
    read_arguments,
)
from eventloop_experiments.ablate.variants import (
    Variant,
    check_variants,
    read_variants,
    variants_of,
)
from eventloop_experiments.runs import ALLOW_CODE_CHANGE, default_folder, describe, share_cores

# Settings that each run has its own value of.
_OWN = ("seed", "run_dir", "resume")
COMMAND = Command(
    "ablate",
    "Shows what algorithms are worth: trains with all, with each off in turn, and with none, for "
    "several seeds, and compares. Those named with -p are ablated, or else all that are active. "
    "Everything else is as for `eventloop fit`. An interrupted ablation resumes.",
    (
        CommandOption("seeds", "N", "train each with the seeds 0 to N-1; 5 unless given"),
        CommandOption("metric", "NAME", "metric to compare: test/accuracy; 'min NAME', 'max NAME'"),
        CommandOption("keep", "NAMES", "algorithms that are on in all runs"),
        CommandOption(
            "variants", "FILE.yaml", "rows of your own, each with algorithms and options"
        ),
        CommandOption(
            "jobs", "N", "number of parallel runs; as many as the cores allow unless given"
        ),
        CommandOption("run-dir", "FOLDER", "where the runs go; runs/ablate-TASK-ID unless given"),
        CommandOption("plot", "FILE.png", "draw the table; needs matplotlib"),
        CommandOption("json", "", "write JSON instead of text"),
        ALLOW_CODE_CHANGE,
        *FIT_OPTIONS,
    ),
)


@dataclass(frozen=True)
class Ablation:
    """An ablation of algorithms.

    Args:
        arguments: arguments of the command line.
        algorithms: the algorithms that are switched off in turn.
        always_on: algorithms that are on in all runs.
        always_off: active algorithms that are off in all runs.
        variants: the rows of the table, "none" first.
        seeds: seeds with which each variant is trained.
        jobs: number of parallel runs.
        threads: OMP_NUM_THREADS of a run; None leaves it unchanged.
        folder: folder of all runs.
        description: identifies the ablation: a command line with the same description resumes it.
    """

    arguments: Arguments
    job: Job
    algorithms: tuple[Plugin, ...]
    always_on: tuple[Plugin, ...]
    always_off: tuple[Plugin, ...]
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    jobs: int
    threads: int | None
    folder: Path
    description: dict[str, Any]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the algorithms that are switched off in turn."""
        return tuple(plugin.name for plugin in self.algorithms)


def read_command_line(argv: Sequence[str]) -> tuple[Arguments, tuple[Variant, ...]]:
    """Reads a command line; with `--variants`, as if it named all algorithms of the file.

    Returns:
        Its arguments, and the rows of the file; no rows without `--variants`.

    Raises:
        UsageError: an argument or the file can't be read.
    """
    arguments = read_arguments(argv, COMMAND)
    path = arguments.path("variants")
    if path is None:
        return arguments, ()
    variants = read_variants(path)
    names = {fold(name): name for variant in variants for name in variant.algorithms}
    choice = arguments.choice
    choice_with_file = replace(
        choice, insist=tuple(dict.fromkeys((*choice.insist, *names.values())))
    )
    return replace(arguments, choice=choice_with_file), variants


def read_ablation(arguments: Arguments, job: Job, variants: tuple[Variant, ...] = ()) -> Ablation:
    """Reads the algorithms, seeds and options of an ablation.

    Args:
        variants: the rows; without rows each algorithm is off in turn.

    Raises:
        UsageError: there is nothing to ablate, or an option is set that each run sets itself.
        PluginError: an algorithm can't be built with its options.
    """
    _refuse_own(arguments)
    always_on, ablated, always_off = _algorithms(arguments, job)
    if not ablated:
        raise UsageError(
            "there is no algorithm to ablate: none is active",
            fix="install one, or switch one on with `-p NAME`",
        )
    for plugin in (*always_on, *ablated):  # fails now instead of in each run
        job.build_plugin(plugin)
    names = tuple(plugin.name for plugin in ablated)
    if variants:
        check_variants(variants, names, job)
    description = {
        **describe(job, arguments, (*ablated, *always_on), apart_from=_OWN),
        "algorithms": list(names),
        "keep": [plugin.name for plugin in always_on],
    }
    if variants:
        description["variants"] = {
            variant.name: {"-p": list(variant.algorithms), **dict(variant.options)}
            for variant in variants
        }
    jobs, threads = share_cores(job, arguments)
    return Ablation(
        arguments,
        job,
        ablated,
        always_on,
        always_off,
        variants or variants_of(names),
        tuple(range(arguments.count("seeds", 5))),
        jobs,
        threads,
        default_folder("ablate", job, arguments, description),
        description,
    )


def _refuse_own(arguments: Arguments) -> None:
    for name in _OWN:
        if name in arguments.flags:
            fix = "say `--seeds 5`" if name == "seed" else f"leave {flag(name)} out"
            raise UsageError(f"{flag(name)} belongs to each run of an ablation", fix=fix)


def _algorithms(arguments: Arguments, job: Job) -> tuple[tuple[Plugin, ...], ...]:
    """Returns the algorithms that are always on, the ablated algorithms, and those that are always off."""
    algorithms = [plugin for plugin in job.plugins if plugin.role == "algorithm"]
    keep = {fold(name) for name in arguments.given.get("keep", "").split(",") if name}
    names = [plugin.name for plugin in algorithms]
    for name in sorted(keep - set(map(fold, names))):
        raise UsageError(
            f"--keep: no active algorithm is named {name!r}{closest(name, names)}",
            fix="list them with `eventloop plugins`; several are separated by commas",
        )
    candidates = [plugin for plugin in algorithms if fold(plugin.name) not in keep]
    insisted = set(map(fold, arguments.choice.insist))
    named = [plugin for plugin in candidates if plugin.by_flag or fold(plugin.name) in insisted]
    ablated = named or candidates
    return (
        tuple(plugin for plugin in algorithms if fold(plugin.name) in keep),
        tuple(ablated),
        tuple(plugin for plugin in candidates if plugin not in ablated),
    )
