"""The run that the runs of a command are variants of: what makes it, and its command line."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.commands import (
    FIT_OPTIONS,
    Arguments,
    CommandOption,
    UsageError,
    flag,
    fold,
    json_value,
    place_of,
    shown_options,
)

if TYPE_CHECKING:
    from eventloop.commands import Job, Plugin


def fit_argv(arguments: Arguments, *, without: Iterable[Plugin] = ()) -> list[str]:
    """Returns the command line of a run: the command's arguments as arguments of `fit`.

    Folder, result, and what differs from run to run are for the command to add; of a setting the
    last value counts.

    Args:
        without: plugins that take no part in the run; what was said of them is left out.
    """
    gone = [*without]
    silent = {fold(one.name) for one in gone}
    # A lock is of all plugins together.
    argv = ["fit", arguments.task, "--unlocked"]
    for option in (CommandOption("config", "FILE", ""), *FIT_OPTIONS):
        if (value := arguments.given.get(fold(option.name))) is not None:
            argv.append(f"{flag(option.name)}={value}")
    if "no_plugins" in arguments.given:
        argv.append("--no-plugins")
    argv += _choice(arguments, gone)
    for key, value in arguments.flags.items():
        if key.partition(".")[0] not in silent or "." not in key:
            argv.append(f"{flag(key)}={value}")
    return argv


def describe(
    job: Job,
    arguments: Arguments,
    plugins: Iterable[Plugin],
    *,
    apart_from: Collection[str] = (),
) -> dict[str, Any]:
    """Returns what a command's runs have in common, in the form of a manifest.

    Args:
        plugins: those that count.
        apart_from: settings that don't, since each run has its own.
    """
    settings = {
        name: value.value
        for name, value in job.configuration.setting_values().items()
        if value.source != "default" and name not in apart_from
    }
    return {
        "task": job.origin(),
        "settings": json_value(shown_options(settings)),
        "command": {fold(one.name): arguments.given.get(fold(one.name)) for one in FIT_OPTIONS},
        "plugins": [
            {
                "name": one.name,
                "role": one.role,
                "version": one.version,
                "options": json_value(shown_options(job.plugin_options(one))),
            }
            for one in plugins
        ],
    }


def default_folder(
    command: str, job: Job, arguments: Arguments, description: dict[str, Any]
) -> Path:
    """Returns the folder of a command's runs: of `--run-dir`, else one of the description's own.

    Without `--run-dir` the same command line finds what it left, and another begins anew.

    Raises:
        UsageError: `--run-dir` is a URL.
    """
    given = arguments.given.get("run_dir")
    if given is not None:
        place = place_of(given)
        if not isinstance(place, Path):
            raise UsageError(
                f"--run-dir {given} is not a folder", fix="name a folder of this machine"
            )
        return place
    text = json.dumps([arguments.task, description], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return Path("runs", f"{command}-{job.task_file.name}-{digest}")


def share_cores(job: Job, arguments: Arguments) -> tuple[int, int | None]:
    """Returns how many runs go at once, and how many threads each has; None for its own choice.

    As many as have cores of their own, or as `--jobs N` says; one on a GPU, whose memory they
    would share.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    ranks = arguments.count("nproc")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if "jobs" in arguments.given:
        jobs = arguments.count("jobs")
        return jobs, max(1, cores // (jobs * ranks)) if jobs > 1 and not threads else None
    import torch

    if job.configuration.setting("device") != "cpu" and torch.accelerator.is_available():
        return 1, None
    each = int(threads) if threads.isdigit() else torch.get_num_threads()
    return max(1, cores // max(1, each * ranks)), None


def _choice(arguments: Arguments, gone: Collection[Plugin]) -> Iterator[str]:
    """Yields the `-p` of a run: those of the command line, and what switches the others off."""
    choice = arguments.choice
    names = {fold(plugin.name) for plugin in gone}
    files = {plugin.source for plugin in gone if plugin.by_flag}
    yield from (f"-p{name}" for name in choice.insist if fold(name) not in names)
    yield from (f"-p{file}" for file in choice.files if file not in files)
    yield from (f"-pno:{name}" for name in choice.off)
    yield from (f"-pno:{plugin.name}" for plugin in gone if not plugin.by_flag)
