"""The results of a sweep: the best trial as a command line and a file, counts, plots."""

from __future__ import annotations

import contextlib
import io
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import yaml  # type: ignore[import-untyped]
from optuna.trial import FrozenTrial, TrialState

from eventloop import Url
from eventloop.commands import counted, fold, one_line
from eventloop_experiments.sweep.pruning import PRUNED_AT
from eventloop_experiments.sweep.sweep_request import Sweep

METRIC = "metric"  # attribute of a study: the metric's name
OBJECTIVE = "objective"  # attribute of a study: the evaluation that is a trial's value
_BEST = "best.yaml"


def header(sweep: Sweep, study: optuna.Study, num_left: int) -> Iterator[str]:
    """Yields the lines printed before the first trial."""
    at_once = f", {sweep.jobs} at a time" if sweep.jobs > 1 else ""
    yield f"sweep: {sweep.arguments.task}, {counted(sweep.num_trials, 'trial')}{at_once}"
    for dimension in sweep.dimensions:
        yield f"  {dimension.name}: {dimension}"
    yield (
        f"study: {study.study_name}, {study.direction.name.lower()} "
        f"{study.user_attrs[METRIC]} of the {sweep.objective} evaluation, {type(study.sampler).__name__}, "
        f"{type(study.pruner).__name__}"
    )
    yield f"run dir: {sweep.folder}"
    if num_left < sweep.num_trials:
        yield f"resumed: {sweep.num_trials - num_left} of {sweep.num_trials} trials are done"


def best_of(study: optuna.Study) -> FrozenTrial | None:
    """Returns the best trial; None if no trial is complete."""
    if not any(trial.state == TrialState.COMPLETE for trial in study.get_trials(deepcopy=False)):
        return None
    return study.best_trial


def write_best(sweep: Sweep, study: optuna.Study) -> FrozenTrial | None:
    """Writes the options of the best trial as a file for `--config`; returns the trial."""
    best = best_of(study)
    if best is not None:
        content = _config(sweep, best)
        text = f"# trial {best.number} of {study.study_name}: {best.value}\n"
        path = sweep.folder / _BEST
        path.write_text(text + yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return best


def summary(sweep: Sweep, study: optuna.Study, best: FrozenTrial | None) -> Iterator[str]:
    """Yields the lines printed at the end."""
    trials = study.get_trials(deepcopy=False)
    states = Counter(trial.state for trial in trials)
    shown = ", ".join(f"{number} {state.name.lower()}" for state, number in states.items())
    yield f"trials: {shown}"
    for trial in trials:
        if trial.state == TrialState.PRUNED:
            shown = (
                f"{study.user_attrs[METRIC]} {trial.value:.6g}" if trial.value is not None else ""
            )
            moment = f"at evaluation {trial.user_attrs.get(PRUNED_AT)}"
            yield one_line(f"pruned: trial {trial.number}, {moment}: {shown}".rstrip(": "))
    for trial in trials:
        if trial.state == TrialState.FAIL:
            yield one_line(f"failed: trial {trial.number}: {trial.user_attrs.get('reason', '')}")
    if best is None:
        yield "no trial was completed"
        return
    yield f"best: trial {best.number}, {study.user_attrs[METRIC]} {best.value:.6g}"
    for name, value in best.params.items():
        yield f"  {name}: {value}"
    yield f"file: {sweep.folder / _BEST}"
    yield paste_line(sweep, best)


def paste_line(sweep: Sweep, best: FrozenTrial) -> str:
    """Returns the command line that trains with the options of a trial."""
    argv = [
        argument
        for argument in sweep.fit_line(_values(sweep, best, plugins=True))
        if argument != "--unlocked"
    ]
    return shlex.join(["eventloop", *argv])


def content_of(sweep: Sweep, study: optuna.Study, best: FrozenTrial | None) -> dict[str, Any]:
    """Returns the sweep as JSON-serializable data."""
    return {
        "task": sweep.arguments.task,
        "study": study.study_name,
        "metric": study.user_attrs[METRIC],
        "direction": study.direction.name.lower(),
        "objective": sweep.objective,
        "run_dir": str(sweep.folder),
        "best": None if best is None else best.number,
        "fit": None if best is None else paste_line(sweep, best),
        "trials": [
            {
                "number": trial.number,
                "state": trial.state.name.lower(),
                "value": trial.value,
                "options": trial.params,
                "evaluations": trial.intermediate_values,
                "reason": trial.user_attrs.get("reason"),
                "pruned_at": trial.user_attrs.get(PRUNED_AT),
            }
            for trial in study.get_trials(deepcopy=False)
        ],
    }


def draw(study: optuna.Study, path: Path) -> bool:
    """Draws a study with Optuna's plots, in a column; returns False if no trial is complete."""
    if best_of(study) is None:
        return False
    import warnings

    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot
    from optuna.visualization import matplotlib as plots

    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    kinds: tuple[Callable[[optuna.Study], object], ...] = (
        plots.plot_optimization_history,
        plots.plot_param_importances,
        plots.plot_slice,
        plots.plot_intermediate_values,
    )
    images = []
    for plot in kinds:
        with contextlib.suppress(ValueError, RuntimeError):  # too few trials for this plot
            plot(study)
            drawn = io.BytesIO()
            pyplot.gcf().savefig(drawn, format="png", dpi=120, bbox_inches="tight")
            drawn.seek(0)
            images.append(pyplot.imread(drawn))
        pyplot.close("all")
    figure, rows = pyplot.subplots(
        len(images), figsize=(10, 6 * len(images)), layout="constrained", squeeze=False
    )
    for axes, image in zip(rows[:, 0], images, strict=True):
        axes.imshow(image)
        axes.axis("off")
    figure.savefig(path, dpi=150)
    pyplot.close("all")
    return True


def _values(sweep: Sweep, best: FrozenTrial, *, plugins: bool = False) -> dict[str, str]:
    """Returns the options of a trial as typed on a command line."""
    return {
        name: repr(value) if isinstance(value, float) else str(value)
        for name, value in best.params.items()
        if plugins or not name.startswith("-p ")
    }


def _config(sweep: Sweep, best: FrozenTrial) -> dict[str, Any]:
    """Returns the content of a `--config` file with which `fit` repeats a trial."""
    layers = sweep.job.configuration.layers
    options = sweep.arguments.given
    # With `--config`, its file is the first; the other files are found without being named.
    file = next(layer for layer in layers if layer.kind == "file") if "config" in options else None
    values = {key: value.value for key, value in file.values.items()} if file else {}
    for key, text in (sweep.arguments.flags | _values(sweep, best)).items():
        values[key] = _plain(sweep.job.convert(key, text), text)
    values |= {"autoload": False} if "no_plugins" in options else {}
    rules = {key: rule.value for key, rule in file.rules.items()} if file else {}
    rules |= _lists(sweep, best)
    content: dict[str, Any] = {}
    sections: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (sections.setdefault(section, {}) if section else content)[name] = value
    content |= {"task": sections.pop("task")} if "task" in sections else {}
    # If `plugins` is a list of names, the sections of plugins move to the top level.
    content |= sections if "plugins" in rules or not sections else {"plugins": sections}
    return content | rules


def _lists(sweep: Sweep, best: FrozenTrial) -> dict[str, list[str]]:
    """Returns the lists of plugins, including the lists of weaker files, which this file replaces."""
    rules = sweep.job.configuration.rules
    choice = sweep.arguments.choice
    off = {fold(name): name for name in choice.off} | sweep.switched_off(best.params)
    chosen = [str(value) for name, value in best.params.items() if name.startswith("-p ")]
    on = {fold(name): name for name in (*choice.insist, *chosen) if not name.startswith("no:")}
    on |= {fold(plugin.name): f"{plugin.name}{plugin.specifier}" for plugin in rules.required}
    required = [name for key, name in on.items() if key not in off]
    off = {key: rule.value for key, rule in rules.disable.items() if key not in on} | off
    plugins = [
        _label(plugin.label, plugin.folder)
        for plugin in sweep.job.configuration.local
        if not plugin.source or plugin.source != rules.site
    ]
    lists = {"disable": [*off.values()], "required": required, "plugins": plugins}
    # An empty `required` is written, too, with --no-plugins: it overrides the project's list.
    overrides_project = "no_plugins" in sweep.arguments.given
    return {
        key: names
        for key, names in lists.items()
        if names or (key == "required" and overrides_project)
    }


def _label(label: str, folder: Path) -> str:
    """Returns a plugin's label with an absolute path, valid in any folder; names of modules are unchanged."""
    path, end, name = label.partition(".py")
    return f"{Path(folder, path).resolve()}{end}{name}" if end else path


def _plain(value: object, text: str) -> object:
    """Returns a value that YAML can write; other types as the text from which they are parsed."""
    if value is None or type(value) in (bool, int, float):
        return value
    return str(value) if isinstance(value, Url) else text  # without its password
