"""From a command line to an ablation: which algorithms, seeds and flags."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eventloop.cli.arguments import Arguments, Command, CommandOption
from eventloop.cli.job import Job
from eventloop.cli.launch import OPTION as NPROC
from eventloop.cli.modes import OPTIONS as MODES
from eventloop.errors import UsageError, closest
from eventloop.manifest import plain
from eventloop.options import flag
from eventloop.plugin.configure import configure
from eventloop.plugin.load import Loaded
from eventloop.plugin.records import fold
from eventloop.urls import place_of

# What `fit` is given as it is: flags that are no settings.
_PASSED = (NPROC, *(one for one in MODES if one.name.startswith("limit-")))
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
        CommandOption("jobs", "N", "how many runs at once; as many as have cores of their own"),
        CommandOption("run-dir", "FOLDER", "where the runs go; runs/ablate-TASK-ID unless given"),
        CommandOption("plot", "FILE.png", "draw the table; needs matplotlib"),
        CommandOption("json", "", "write JSON instead of a table"),
        *_PASSED,
    ),
)


@dataclass(frozen=True)
class Ablation:
    """What is to be compared.

    Args:
        arguments: of the command line.
        algorithms: those that are switched off in turn.
        kept: those that take part in all runs.
        others: active ones that take part in none.
        seeds: each run is trained with each.
        jobs: how many runs at once.
        threads: of a run, for OMP_NUM_THREADS; None leaves that as it is.
        folder: of all runs.
        description: what makes two ablations the same.
    """

    arguments: Arguments
    algorithms: tuple[Loaded, ...]
    kept: tuple[Loaded, ...]
    others: tuple[Loaded, ...]
    seeds: tuple[int, ...]
    jobs: int
    threads: int | None
    folder: Path
    description: dict[str, Any]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the algorithms that are switched off in turn."""
        return tuple(one.found.name for one in self.algorithms)

    def passed(self) -> Iterator[str]:
        """Gives the flags of `fit` that are no settings, as typed."""
        given = self.arguments.given
        for option in (CommandOption("config", "FILE", ""), *_PASSED):
            if (value := given.get(fold(option.name))) is not None:
                yield f"{flag(option.name)}={value}"
        if "no_plugins" in given:
            yield "--no-plugins"


def read_ablation(arguments: Arguments, job: Job) -> Ablation:
    """Reads what is to be compared.

    Raises:
        UsageError: there is nothing to ablate, or something is said that each run says itself.
        PluginError: an algorithm can't be built with its options.
    """
    for name in _OWN:
        if name in arguments.flags:
            instead = "say `--seeds 5`" if name == "seed" else f"leave {flag(name)} out"
            raise UsageError(f"{flag(name)} belongs to each run of an ablation", fix=instead)
    kept, ablated, others = _algorithms(arguments, job)
    if not ablated:
        raise UsageError(
            "there is no algorithm to ablate: none is active",
            fix="install one, or name one that sleeps or is switched off with `-p NAME`",
        )
    for one in (*kept, *ablated):  # an option that can't be would fail run after run
        configure(one.found, one.target, job.configuration.section(one.found.name))
    description = _description(arguments, job, ablated, kept)
    threads, jobs = _threads_and_jobs(arguments, job)
    return Ablation(
        arguments,
        ablated,
        kept,
        others,
        tuple(range(_number(arguments, "seeds", 5))),
        jobs,
        threads,
        _folder(arguments, job, description),
        description,
    )


def _algorithms(arguments: Arguments, job: Job) -> tuple[tuple[Loaded, ...], ...]:
    """Gives the algorithms that are kept, those that are ablated, and the others."""
    there = [one for one in job.plugins if one.found.role == "algorithm"]
    kept = {fold(name) for name in arguments.given.get("keep", "").split(",") if name}
    known = [one.found.name for one in there]
    for name in sorted(kept - set(map(fold, known))):
        raise UsageError(
            f"--keep: no active algorithm is named {name!r}{closest(name, known)}",
            fix="list them with `eventloop plugins`; several are separated by commas",
        )
    rest = [one for one in there if fold(one.found.name) not in kept]
    insisted = set(map(fold, arguments.choice.insist))
    named = [one for one in rest if one.found.path or fold(one.found.name) in insisted]
    ablated = named or rest
    return (
        tuple(one for one in there if fold(one.found.name) in kept),
        tuple(ablated),
        tuple(one for one in rest if one not in ablated),
    )


def _description(
    arguments: Arguments, job: Job, ablated: Sequence[Loaded], kept: Sequence[Loaded]
) -> dict[str, Any]:
    """Gives what makes two ablations the same, in the form of a manifest."""
    configuration = job.configuration
    settings = {
        name: plain(value.value)
        for name, value in configuration.setting_values().items()
        if value.source != "default" and name not in _OWN
    }
    given = arguments.given
    return {
        "task": job.origin(),
        "settings": settings,
        "command": {fold(one.name): given.get(fold(one.name)) for one in _PASSED},
        "algorithms": [one.found.name for one in ablated],
        "keep": [one.found.name for one in kept],
        "plugins": [
            {
                "name": one.found.name,
                "role": one.found.role,
                "version": one.found.version,
                "options": {name: plain(value) for name, value in job.plugin_options(one).items()},
            }
            for one in (*ablated, *kept)
        ],
    }


def _folder(arguments: Arguments, job: Job, description: dict[str, Any]) -> Path:
    """Gives the folder: the same line finds what it left, another one what it hasn't begun."""
    given = arguments.given.get("run_dir")
    if given is not None:
        place = place_of(given)
        if not isinstance(place, Path):
            raise UsageError(f"--run-dir {given} is no folder", fix="name a folder of this machine")
        return place
    text = json.dumps([arguments.task, description], sort_keys=True)
    return Path(
        "runs", f"ablate-{job.task_file.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    )


def _threads_and_jobs(arguments: Arguments, job: Job) -> tuple[int | None, int]:
    """Gives how many threads a run has, None for as many as it wants, and how many run at once."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    ranks = _number(arguments, NPROC.name, 1)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if "jobs" in arguments.given:
        jobs = _number(arguments, "jobs", 1)
        own = max(1, cores // (jobs * ranks)) if jobs > 1 and not threads else None
        return own, jobs
    device = job.configuration.setting("device")
    if device != "cpu" and torch.cuda.is_available():
        return None, 1  # whose memory they would share
    each = int(threads) if threads.isdigit() else torch.get_num_threads()
    return None, max(1, cores // max(1, each * ranks))


def _number(arguments: Arguments, name: str, default: int) -> int:
    text = arguments.given.get(name, str(default))
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise UsageError(
            f"{flag(name)} takes a number, 1 or more, not {text!r}", fix=f"write `{flag(name)} 2`"
        )
    return int(text)
