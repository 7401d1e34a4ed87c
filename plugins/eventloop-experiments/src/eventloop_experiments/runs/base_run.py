"""The base run, of which a command's runs are variants: its description and its command line."""

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

    The command adds the folder, the result file and the differences between runs itself; the last value
    of a setting counts.

    Args:
        without: plugins that are off in the run; their options are left out.
    """
    plugins_off = [*without]
    sections_off = {fold(plugin.name) for plugin in plugins_off}
    # The lock file pins the whole set of plugins, and runs of this command differ in it.
    argv = ["fit", arguments.task, "--unlocked"]
    for option in (CommandOption("config", "FILE", ""), *FIT_OPTIONS):
        if (value := arguments.given.get(fold(option.name))) is not None:
            argv.append(f"{flag(option.name)}={value}")
    if "no_plugins" in arguments.given:
        argv.append("--no-plugins")
    argv += _choice(arguments, plugins_off)
    for key, value in arguments.flags.items():
        if key.partition(".")[0] not in sections_off or "." not in key:
            argv.append(f"{flag(key)}={value}")
    return argv


def describe(
    job: Job,
    arguments: Arguments,
    plugins: Iterable[Plugin],
    *,
    apart_from: Collection[str] = (),
) -> dict[str, Any]:
    """Returns the configuration that all runs of a command share, in the form of a manifest.

    Args:
        plugins: plugins to include.
        apart_from: settings to leave out, because they differ between runs.
    """
    settings = {
        name: value.value
        for name, value in job.configuration.setting_values().items()
        if value.source != "default" and name not in apart_from
    }
    return {
        "task": job.origin(),
        "settings": json_value(shown_options(settings)),
        "command": {
            fold(option.name): arguments.given.get(fold(option.name)) for option in FIT_OPTIONS
        },
        "plugins": [
            {
                "name": plugin.name,
                "role": plugin.role,
                "version": plugin.version,
                "options": json_value(shown_options(job.plugin_options(plugin))),
            }
            for plugin in plugins
        ],
    }


def default_folder(
    command: str, job: Job, arguments: Arguments, description: dict[str, Any]
) -> Path:
    """Returns the folder of a command's runs: `--run-dir`, or a folder named after a digest of the description.

    Without `--run-dir`, repeating the same command line resumes its runs; a changed one starts anew.

    Raises:
        UsageError: `--run-dir` is a URL.
    """
    run_dir = arguments.given.get("run_dir")
    if run_dir is not None:
        path = place_of(run_dir)
        if not isinstance(path, Path):
            raise UsageError(
                f"--run-dir {run_dir} is not a folder", fix="name a folder of this machine"
            )
        return path
    text = json.dumps([arguments.task, description], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return Path("runs", f"{command}-{job.task_file.name}-{digest}")


def share_cores(job: Job, arguments: Arguments) -> tuple[int, int | None]:
    """Returns the number of parallel runs, and the number of threads of each; None for torch's default.

    `--jobs N` sets the number. Otherwise each run gets its own cores; on a GPU runs are sequential,
    because they would share its memory.
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
    threads_per_run = int(threads) if threads.isdigit() else torch.get_num_threads()
    return max(1, cores // max(1, threads_per_run * ranks)), None


def _choice(arguments: Arguments, plugins_off: Collection[Plugin]) -> Iterator[str]:
    """Yields the `-p` options of a run: those of the command line, and options that switch plugins off."""
    choice = arguments.choice
    names = {fold(plugin.name) for plugin in plugins_off}
    files = {plugin.source for plugin in plugins_off if plugin.by_flag}
    yield from (f"-p{name}" for name in choice.insist if fold(name) not in names)
    yield from (f"-p{file}" for file in choice.files if file not in files)
    yield from (f"-pno:{name}" for name in choice.off)
    yield from (f"-pno:{plugin.name}" for plugin in plugins_off if not plugin.by_flag)
