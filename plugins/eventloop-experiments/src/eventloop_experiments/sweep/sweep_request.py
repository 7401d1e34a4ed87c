"""From a command line to a sweep: what is searched, how, and the command line of a trial."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.commands import (
    FIT_OPTIONS,
    Arguments,
    Command,
    CommandOption,
    Job,
    UsageError,
    closest,
    flag,
    fold,
    prepare,
    read_arguments,
)
from eventloop_experiments.runs import (
    ALLOW_CODE_CHANGE,
    default_folder,
    describe,
    fit_argv,
    read_texts,
    refuse_own,
    share_cores,
)
from eventloop_experiments.sweep.space import (
    Dimension,
    Written,
    alternatives,
    dimension,
    plugins_dimension,
    split_choices,
    written,
)

if TYPE_CHECKING:
    from optuna.trial import Trial

LAST = "last"
BEST = "best"
_MOST_ROWS = 32
_OWN = ("run_dir", "resume")
_FIX = "name a YAML file with a line `task.lr: log:1e-4:1e-1` for each range"
_PRUNING = "eventloop_experiments.sweep.pruning"
COMMAND = Command(
    "sweep",
    "Searches for the best options: trains with values out of ranges, `--task.lr log:1e-4:1e-1`, "
    "`--mixup.alpha 0.0:1.0`, `--task.width 16:64:16`, `--precision fp32,bf16`, and with plugins "
    "on and off, `-p no:ema,ema`. What has no range is as for `eventloop fit`. A sweep that was "
    "interrupted goes on; the same line started twice is two workers.",
    (
        CommandOption("metric", "NAME", "what to optimize: valid/accuracy; 'min NAME', 'max NAME'"),
        CommandOption(
            "objective", "last|best", "which evaluation of a trial counts; the last unless given"
        ),
        CommandOption("trials", "N", "how many there should be in all; 20 unless given"),
        CommandOption("space", "FILE.yaml", "read ranges and choices from a file"),
        CommandOption("sampler", "NAME", "of Optuna: tpe, random, gp; 'tpe:multivariate=true'"),
        CommandOption("pruner", "NAME", "of Optuna: median, hyperband, none"),
        CommandOption(
            "storage", "URL", "of a database; study.db in the sweep's folder unless given"
        ),
        CommandOption("study", "NAME", "the study's name there; that of the sweep's folder"),
        CommandOption("jobs", "N", "how many runs at once; as many as have cores of their own"),
        CommandOption("run-dir", "FOLDER", "where the runs go; runs/sweep-TASK-ID unless given"),
        CommandOption("plot", "FILE.png", "draw the study; needs matplotlib"),
        CommandOption("json", "", "write JSON instead of text"),
        ALLOW_CODE_CHANGE,
        *FIT_OPTIONS,
    ),
)


@dataclass(frozen=True)
class Sweep:
    """What is searched.

    Args:
        arguments: of the command line, without what is searched.
        dimensions: the options that are.
        folder: of all runs.
        description: what makes two sweeps the same.
        threads: of a run, for OMP_NUM_THREADS; None leaves that as it is.
        objective: which evaluation of a trial is its value: the last, or the best.
    """

    arguments: Arguments
    job: Job
    dimensions: tuple[Dimension, ...]
    num_trials: int
    folder: Path
    study: str
    pruner: str
    description: dict[str, Any]
    jobs: int
    threads: int | None
    objective: str = LAST

    def suggested(self, trial: Trial) -> dict[str, str]:
        """Returns the values of a trial; options of plugins that it is without have none."""
        plugins = self._choices_of_plugins()
        values = {one.name: one.suggest(trial) for one in plugins}
        off = self.switched_off(values)
        options = [one for one in self.dimensions if one not in plugins and one.section not in off]
        return values | {one.name: one.suggest(trial) for one in options}

    def first(self, chosen: Mapping[str, str] | None = None) -> dict[str, str]:
        """Returns the first value of each option, for a dry run.

        Args:
            chosen: choices of plugins that differ from that.
        """
        values = {one.name: one.first for one in self.dimensions} | dict(chosen or {})
        off = self.switched_off(values)
        skipped = {one.name for one in self.dimensions if one.section in off}
        return {name: value for name, value in values.items() if name not in skipped}

    def choices(self) -> Iterator[dict[str, str]]:
        """Yields the other choices of plugins: all of them, or of many each once."""
        plugins = self._choices_of_plugins()
        usual = {one.name: one.first for one in plugins}
        several = [
            dict(zip(usual, one, strict=True))
            for one in itertools.product(*(one.choices for one in plugins))
        ]
        if len(several) > _MOST_ROWS:
            several = [usual | {one.name: each} for one in plugins for each in one.choices]
        yield from (one for one in several if one != usual)

    def fit_line(self, values: Mapping[str, str]) -> list[str]:
        """Returns the command line that trains with some values, as it would be typed."""
        chosen = [value for name, value in values.items() if name.startswith("-p ")]
        off = self.switched_off(values)
        gone = [one for one in self.job.plugins if fold(one.name) in off]
        names = {fold(one.name) for one in gone}
        argv = fit_argv(self.arguments, without=gone)
        argv += [f"-p{one}" for one in chosen if fold(one.removeprefix("no:")) not in names]
        argv += [
            f"{flag(name)}={value}" for name, value in values.items() if not name.startswith("-p ")
        ]
        return argv

    def switched_off(self, values: Mapping[str, str]) -> dict[str, str]:
        """Returns the plugins that a trial is without, by folded name: each that it didn't choose, too."""
        plugins = [one for one in self._choices_of_plugins() if one.name in values]
        chosen = [values[one.name] for one in plugins]
        named = [each for one in plugins for each in one.choices if each not in chosen]
        off = [one for one in named if not one.startswith("no:")]
        off += [one.removeprefix("no:") for one in chosen if one.startswith("no:")]
        return {fold(one): one for one in off}

    def modules(self) -> tuple[str, ...]:
        """Returns the modules that each trial imports for the sweep."""
        return () if self.pruner == "none" else (_PRUNING,)

    def argv(self, values: Mapping[str, str], number: int, metric: str) -> list[str]:
        """Returns the command line of a trial."""
        argv = self.fit_line(values)
        if self.pruner != "none":
            argv += [
                f"-p{_PRUNING}:Pruning",
                f"--pruning.study={self.study}",
                f"--pruning.trial={number}",
                f"--pruning.metric={metric}",
                f"--pruning.pruner={self.pruner}",
            ]
        return argv

    def _choices_of_plugins(self) -> list[Dimension]:
        return [one for one in self.dimensions if one.name.startswith("-p ")]


def read_command_line(argv: Sequence[str]) -> tuple[Arguments, list[tuple[str, ...]]]:
    """Reads a command line.

    Returns:
        Its arguments, and the alternatives of plugins, as of `-p no:ema,ema`.
    """
    rest, choices = split_choices(argv)
    return read_arguments(rest, COMMAND), choices


def read_sweep(arguments: Arguments, choices: Sequence[tuple[str, ...]]) -> Sweep:
    """Reads what is searched.

    Raises:
        UsageError: there is nothing to search, or a range can't be.
    """
    refuse_own(arguments, _OWN, "belongs to each trial of a sweep")
    found, choices = _with_file(arguments, choices)
    single = {key: text for key, text in arguments.flags.items() if key not in found}
    job, dimensions, fixed = _understood(replace(arguments, flags=single), found, choices)
    if not dimensions:
        raise UsageError(
            "there is nothing to search: no option has a range",
            fix="write `--task.lr log:1e-4:1e-1`, `--task.width 32,64` or `-p no:ema,ema`",
        )
    description = {
        **describe(job, fixed, job.plugins, apart_from=_OWN),
        "space": [f"{one.name} {one}" for one in dimensions],
    }
    folder = default_folder("sweep", job, arguments, description)
    jobs, threads = share_cores(job, arguments)
    given = arguments.given
    if (objective := given.get("objective", LAST)) not in (LAST, BEST):
        raise UsageError(
            f"--objective: {objective!r} is neither {LAST} nor {BEST}{closest(objective, [LAST, BEST])}",
            fix=f"write `--objective {BEST}`, or leave it out",
        )
    return Sweep(
        fixed,
        job,
        tuple(dimensions),
        arguments.count("trials", 20),
        folder,
        given.get("study") or folder.name,
        given.get("pruner") or "median",
        description,
        jobs,
        threads,
        objective,
    )


def _understood(
    arguments: Arguments, found: Mapping[str, Written], choices: Sequence[tuple[str, ...]]
) -> tuple[Job, list[Dimension], Arguments]:
    """Reads the job of a first trial, in which all plugins take part, and what varies of it.

    Returns:
        The job, what varies, and the arguments without it: a text that looked like a range and is
        a value of its option is one of them.
    """
    first = {key: one.parts[0] for key, one in found.items()}
    wanted = [one for several in choices for one in several if not one.startswith("no:")]
    insist = tuple(dict.fromkeys((*arguments.choice.insist, *wanted)))
    trial = replace(
        arguments,
        flags=arguments.flags | first,
        choice=replace(arguments.choice, insist=insist),
    )
    job = prepare(trial, COMMAND)
    dimensions = [plugins_dimension(one) for one in choices]
    values = {}
    for key, one in found.items():
        if (varies := dimension(key, one, job.convert)) is None:
            values[key] = one.text
        else:
            dimensions.append(varies)
    fixed = replace(arguments, flags=arguments.flags | values)
    if values:  # which the job hasn't seen yet
        job = prepare(replace(trial, flags=trial.flags | values), COMMAND)
    return job, dimensions, fixed


def _with_file(
    arguments: Arguments, choices: Sequence[tuple[str, ...]]
) -> tuple[dict[str, Written], list[tuple[str, ...]]]:
    """Returns what may vary, of the command line and of the file of `--space`.

    Raises:
        UsageError: the file can't be read, or isn't a mapping of options.
    """
    all_choices = list(choices)
    found: dict[str, Written] = {}
    path = arguments.path("space")
    for key, value in read_texts(path, "--space", _FIX).items() if path is not None else ():
        texts = [str(one) for one in value] if isinstance(value, list) else [str(value)]
        if key == "-p":
            all_choices += [alternatives(one.split(",")) for one in texts]
        elif len(texts) > 1:
            found[fold(key)] = Written(", ".join(texts), tuple(texts))
        elif (one := written(texts[0])) is not None:
            found[fold(key)] = one
        else:
            raise UsageError(
                f"{path}: {key}: {texts[0]!r} is not a range",
                fix="write `1e-4:1e-1` or a list; what doesn't vary belongs on the command line",
            )
    for key, text in arguments.flags.items():
        if (one := written(text)) is not None:
            found[key] = one
        else:
            found.pop(key, None)  # the command line is stronger
    return found, all_choices
