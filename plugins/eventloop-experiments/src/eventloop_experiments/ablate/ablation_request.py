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

# Each run has its own.
_OWN = ("seed", "run_dir", "resume")
COMMAND = Command(
    "ablate",
    "Shows what algorithms are worth: trains with all, with each off in turn, and with none, for "
    "several seeds, and compares. Those named with -p are ablated, or else all that are active. "
    "Everything else is as for `eventloop fit`. An ablation that was interrupted goes on.",
    (
        CommandOption("seeds", "N", "train each with the seeds 0 to N-1; 5 unless given"),
        CommandOption("metric", "NAME", "what to compare: test/accuracy; 'min NAME', 'max NAME'"),
        CommandOption("keep", "NAMES", "algorithms that take part in all runs"),
        CommandOption(
            "variants", "FILE.yaml", "rows of your own, each with algorithms and options"
        ),
        CommandOption("jobs", "N", "how many runs at once; as many as have cores of their own"),
        CommandOption("run-dir", "FOLDER", "where the runs go; runs/ablate-TASK-ID unless given"),
        CommandOption("plot", "FILE.png", "draw the table; needs matplotlib"),
        CommandOption("json", "", "write JSON instead of text"),
        ALLOW_CODE_CHANGE,
        *FIT_OPTIONS,
    ),
)


@dataclass(frozen=True)
class Ablation:
    """What is to be compared.

    Args:
        arguments: of the command line.
        algorithms: those that are switched off in turn.
        always_on: those that take part in all runs.
        others: active ones that take part in none.
        variants: the rows of the table, "none" first.
        seeds: each run is trained with each.
        jobs: how many runs at once.
        threads: of a run, for OMP_NUM_THREADS; None leaves that as it is.
        folder: of all runs.
        description: what makes two ablations the same.
    """

    arguments: Arguments
    job: Job
    algorithms: tuple[Plugin, ...]
    always_on: tuple[Plugin, ...]
    others: tuple[Plugin, ...]
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    jobs: int
    threads: int | None
    folder: Path
    description: dict[str, Any]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the algorithms that are switched off in turn."""
        return tuple(one.name for one in self.algorithms)


def read_command_line(argv: Sequence[str]) -> tuple[Arguments, tuple[Variant, ...]]:
    """Reads a command line; with `--variants`, as if all algorithms of the file stood on it.

    Returns:
        Its arguments, and the rows of the file; none without one.

    Raises:
        UsageError: one of them can't be read.
    """
    arguments = read_arguments(argv, COMMAND)
    path = arguments.path("variants")
    if path is None:
        return arguments, ()
    variants = read_variants(path)
    names = {fold(name): name for one in variants for name in one.algorithms}
    choice = arguments.choice
    wanted = replace(choice, insist=tuple(dict.fromkeys((*choice.insist, *names.values()))))
    return replace(arguments, choice=wanted), variants


def read_ablation(arguments: Arguments, job: Job, variants: tuple[Variant, ...] = ()) -> Ablation:
    """Reads what is to be compared.

    Args:
        variants: the rows, where they are given; else each algorithm is off in turn.

    Raises:
        UsageError: there is nothing to ablate, or something is said that each run says itself.
        PluginError: an algorithm can't be built with its options.
    """
    _refuse_own(arguments)
    always_on, ablated, others = _algorithms(arguments, job)
    if not ablated:
        raise UsageError(
            "there is no algorithm to ablate: none is active",
            fix="install one, or name one that sleeps or is switched off with `-p NAME`",
        )
    for one in (*always_on, *ablated):  # an option that can't be would fail run after run
        job.build_plugin(one)
    names = tuple(one.name for one in ablated)
    if variants:
        check_variants(variants, names, job)
    description = {
        **describe(job, arguments, (*ablated, *always_on), apart_from=_OWN),
        "algorithms": list(names),
        "keep": [one.name for one in always_on],
    }
    if variants:
        description["variants"] = {
            one.name: {"-p": list(one.algorithms), **dict(one.options)} for one in variants
        }
    jobs, threads = share_cores(job, arguments)
    return Ablation(
        arguments,
        job,
        ablated,
        always_on,
        others,
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
            instead = "say `--seeds 5`" if name == "seed" else f"leave {flag(name)} out"
            raise UsageError(f"{flag(name)} belongs to each run of an ablation", fix=instead)


def _algorithms(arguments: Arguments, job: Job) -> tuple[tuple[Plugin, ...], ...]:
    """Returns the algorithms that are always on, those that are ablated, and the others."""
    there = [one for one in job.plugins if one.role == "algorithm"]
    always_on = {fold(name) for name in arguments.given.get("keep", "").split(",") if name}
    known = [one.name for one in there]
    for name in sorted(always_on - set(map(fold, known))):
        raise UsageError(
            f"--keep: no active algorithm is named {name!r}{closest(name, known)}",
            fix="list them with `eventloop plugins`; several are separated by commas",
        )
    rest = [one for one in there if fold(one.name) not in always_on]
    insisted = set(map(fold, arguments.choice.insist))
    named = [one for one in rest if one.by_flag or fold(one.name) in insisted]
    ablated = named or rest
    return (
        tuple(one for one in there if fold(one.name) in always_on),
        tuple(ablated),
        tuple(one for one in rest if one not in ablated),
    )
