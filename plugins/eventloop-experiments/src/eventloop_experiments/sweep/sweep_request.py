"""From a command line to a sweep: its search space, its settings, and the command lines of trials."""

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
    dimension_of,
    plugins_dimension,
    split_choices,
    written,
)

if TYPE_CHECKING:
    from optuna.trial import Trial

LAST = "last"
BEST = "best"
_MAX_DRY_RUNS = 32
_OWN = ("run_dir", "resume")
_FIX = "name a YAML file with a line `task.lr: log:1e-4:1e-1` for each range"
_PRUNING = "eventloop_experiments.sweep.pruning"
COMMAND = Command(
    "sweep",
    "Searches for the best options: trains with values out of ranges, `--task.lr log:1e-4:1e-1`, "
    "`--mixup.alpha 0.0:1.0`, `--task.width 16:64:16`, `--precision fp32,bf16`, and with plugins "
    "on and off, `-p no:ema,ema`. Options without a range are as for `eventloop fit`. A sweep that was "
    "interrupted resumes; starting the same line twice starts two workers.",
    (
        CommandOption(
            "metric", "NAME", "metric to optimize: valid/accuracy; 'min NAME', 'max NAME'"
        ),
        CommandOption(
            "objective", "last|best", "which evaluation of a trial counts; the last unless given"
        ),
        CommandOption("trials", "N", "total number of trials; 20 unless given"),
        CommandOption("space", "FILE.yaml", "read ranges and choices from a file"),
        CommandOption(
            "sampler", "NAME", "sampler of Optuna: tpe, random, gp; 'tpe:multivariate=true'"
        ),
        CommandOption("pruner", "NAME", "pruner of Optuna: median, hyperband, none"),
        CommandOption(
            "storage", "URL", "URL of a database; study.db in the sweep's folder unless given"
        ),
        CommandOption(
            "study", "NAME", "name of the study in the database; the folder's name unless given"
        ),
        CommandOption(
            "jobs", "N", "number of parallel runs; as many as the cores allow unless given"
        ),
        CommandOption("run-dir", "FOLDER", "where the runs go; runs/sweep-TASK-ID unless given"),
        CommandOption("plot", "FILE.png", "draw the study; needs matplotlib"),
        CommandOption("json", "", "write JSON instead of text"),
        ALLOW_CODE_CHANGE,
        *FIT_OPTIONS,
    ),
)


@dataclass(frozen=True)
class Sweep:
    """A sweep over options.

    Args:
        arguments: arguments of the command line, without the options that are searched.
        dimensions: the options that are searched.
        folder: folder of all runs.
        description: identifies the sweep: a repeated command line with the same description resumes it.
        threads: OMP_NUM_THREADS of a run; None leaves it unchanged.
        objective: the evaluation that is a trial's value: the last, or the best.
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
        """Samples the values of a trial; skips options of plugins that the trial switches off."""
        plugins = self._choices_of_plugins()
        values = {dimension.name: dimension.suggest(trial) for dimension in plugins}
        off = self.switched_off(values)
        options = [
            dimension
            for dimension in self.dimensions
            if dimension not in plugins and dimension.section not in off
        ]
        return values | {dimension.name: dimension.suggest(trial) for dimension in options}

    def first(self, chosen: Mapping[str, str] | None = None) -> dict[str, str]:
        """Returns the first value of each option, for a dry run.

        Args:
            chosen: choices of plugins that replace the first ones.
        """
        values = {dimension.name: dimension.first for dimension in self.dimensions} | dict(
            chosen or {}
        )
        off = self.switched_off(values)
        skipped = {dimension.name for dimension in self.dimensions if dimension.section in off}
        return {name: value for name, value in values.items() if name not in skipped}

    def choices(self) -> Iterator[dict[str, str]]:
        """Yields the choices of plugins apart from the first; if there are many, each value only once."""
        plugins = self._choices_of_plugins()
        first_choices = {dimension.name: dimension.first for dimension in plugins}
        combinations = [
            dict(zip(first_choices, values, strict=True))
            for values in itertools.product(*(dimension.choices for dimension in plugins))
        ]
        # Each choice is a dry run, and combinations grow exponentially.
        if len(combinations) > _MAX_DRY_RUNS:
            combinations = [
                first_choices | {dimension.name: value}
                for dimension in plugins
                for value in dimension.choices
            ]
        for combination in combinations:
            if combination != first_choices:
                yield combination

    def fit_line(self, values: Mapping[str, str]) -> list[str]:
        """Returns the command line that trains with the given values, as it would be typed."""
        chosen = [value for name, value in values.items() if name.startswith("-p ")]
        off = self.switched_off(values)
        plugins_off = [plugin for plugin in self.job.plugins if fold(plugin.name) in off]
        names = {fold(plugin.name) for plugin in plugins_off}
        argv = fit_argv(self.arguments, without=plugins_off)
        argv += [f"-p{value}" for value in chosen if fold(value.removeprefix("no:")) not in names]
        argv += [
            f"{flag(name)}={value}" for name, value in values.items() if not name.startswith("-p ")
        ]
        return argv

    def switched_off(self, values: Mapping[str, str]) -> dict[str, str]:
        """Returns the plugins that a trial switches off, by folded name.

        These are its choices `no:NAME`, and the alternatives of its choices.
        """
        off = []
        for dimension in self._choices_of_plugins():
            if dimension.name not in values:
                continue
            chosen = values[dimension.name]
            off += [
                value
                for value in dimension.choices
                if value != chosen and not value.startswith("no:")
            ]
            if chosen.startswith("no:"):
                off.append(chosen.removeprefix("no:"))
        return {fold(name): name for name in off}

    def modules(self) -> tuple[str, ...]:
        """Returns the modules that the sweep adds to each trial."""
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
        return [dimension for dimension in self.dimensions if dimension.name.startswith("-p ")]


def read_command_line(argv: Sequence[str]) -> tuple[Arguments, list[tuple[str, ...]]]:
    """Reads a command line.

    Returns:
        Its arguments, and the alternatives of plugins, such as `-p no:ema,ema`.
    """
    remaining_argv, choices = split_choices(argv)
    return read_arguments(remaining_argv, COMMAND), choices


def read_sweep(arguments: Arguments, choices: Sequence[tuple[str, ...]]) -> Sweep:
    """Reads the search space and the settings of a sweep.

    Raises:
        UsageError: there is nothing to search, or a range is invalid.
    """
    refuse_own(arguments, _OWN, "belongs to each trial of a sweep")
    candidates, choices = _with_file(arguments, choices)
    single = {key: text for key, text in arguments.flags.items() if key not in candidates}
    job, dimensions, fixed = _understood(replace(arguments, flags=single), candidates, choices)
    if not dimensions:
        raise UsageError(
            "there is nothing to search: no option has a range",
            fix="write `--task.lr log:1e-4:1e-1`, `--task.width 32,64` or `-p no:ema,ema`",
        )
    description = {
        **describe(job, fixed, job.plugins, apart_from=_OWN),
        "space": [f"{dimension.name} {dimension}" for dimension in dimensions],
    }
    folder = default_folder("sweep", job, arguments, description)
    jobs, threads = share_cores(job, arguments)
    command_options = arguments.given
    if (objective := command_options.get("objective", LAST)) not in (LAST, BEST):
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
        command_options.get("study") or folder.name,
        command_options.get("pruner") or "median",
        description,
        jobs,
        threads,
        objective,
    )


def _understood(
    arguments: Arguments, candidates: Mapping[str, Written], choices: Sequence[tuple[str, ...]]
) -> tuple[Job, list[Dimension], Arguments]:
    """Builds the job of a first trial, with all plugins active, and the dimensions of the search.

    Returns:
        The job, the dimensions, and the arguments of the fixed options. A text that looked like a
        range but is a plain value of its option, such as a URL, becomes a fixed option.
    """
    first_values = {key: candidate.values[0] for key, candidate in candidates.items()}
    plugins = [name for names in choices for name in names if not name.startswith("no:")]
    insist = tuple(dict.fromkeys((*arguments.choice.insist, *plugins)))
    trial = replace(
        arguments,
        flags=arguments.flags | first_values,
        choice=replace(arguments.choice, insist=insist),
    )
    job = prepare(trial, COMMAND)
    dimensions = [plugins_dimension(names) for names in choices]
    values = {}
    for key, candidate in candidates.items():
        option_dimension = dimension_of(key, candidate, job.convert)
        if option_dimension is None:
            values[key] = candidate.text
        else:
            dimensions.append(option_dimension)
    fixed = replace(arguments, flags=arguments.flags | values)
    if values:  # the job was prepared with only the first part of them
        job = prepare(replace(trial, flags=trial.flags | values), COMMAND)
    return job, dimensions, fixed


def _with_file(
    arguments: Arguments, choices: Sequence[tuple[str, ...]]
) -> tuple[dict[str, Written], list[tuple[str, ...]]]:
    """Returns the possible ranges and choices on the command line and in the file of `--space`.

    Raises:
        UsageError: the file can't be read, or isn't a mapping of options.
    """
    all_choices = list(choices)
    candidates: dict[str, Written] = {}
    path = arguments.path("space")
    for key, value in read_texts(path, "--space", _FIX).items() if path is not None else ():
        texts = [str(text) for text in value] if isinstance(value, list) else [str(value)]
        if key == "-p":
            all_choices += [alternatives(text.split(",")) for text in texts]
        elif len(texts) > 1:
            candidates[fold(key)] = Written(", ".join(texts), tuple(texts))
        elif (candidate := written(texts[0])) is not None:
            candidates[fold(key)] = candidate
        else:
            raise UsageError(
                f"{path}: {key}: {texts[0]!r} is not a range",
                fix="write `1e-4:1e-1` or a list; fixed values belong on the command line",
            )
    for key, text in arguments.flags.items():
        if (candidate := written(text)) is not None:
            candidates[key] = candidate
        else:
            candidates.pop(key, None)  # the command line overrides the file
    return candidates, all_choices
