"""What came of a sweep: the best trial as a line to paste and a file, counts, plots."""

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

METRIC = "metric"  # of a study: its name
OBJECTIVE = "objective"  # of a study: which evaluation of a trial counts
_BEST = "best.yaml"


def header(sweep: Sweep, study: optuna.Study, num_left: int) -> Iterator[str]:
    """Yields the lines printed before the first trial."""
    at_once = f", {sweep.jobs} at a time" if sweep.jobs > 1 else ""
    yield f"sweep: {sweep.arguments.task}, {counted(sweep.num_trials, 'trial')}{at_once}"
    for one in sweep.dimensions:
        yield f"  {one.name}: {one}"
    yield (
        f"study: {study.study_name}, {study.direction.name.lower()} "
        f"{study.user_attrs[METRIC]} of the {sweep.objective} evaluation, {type(study.sampler).__name__}, "
        f"{type(study.pruner).__name__}"
    )
    yield f"run dir: {sweep.folder}"
    if num_left < sweep.num_trials:
        yield f"resumed: {sweep.num_trials - num_left} of {sweep.num_trials} trials are done"


def best_of(study: optuna.Study) -> FrozenTrial | None:
    """Returns the best trial; None where none is complete."""
    if not any(one.state == TrialState.COMPLETE for one in study.get_trials(deepcopy=False)):
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
    states = Counter(one.state for one in trials)
    shown = ", ".join(f"{number} {state.name.lower()}" for state, number in states.items())
    yield f"trials: {shown}"
    for one in trials:
        if one.state == TrialState.PRUNED:
            shown = f"{study.user_attrs[METRIC]} {one.value:.6g}" if one.value is not None else ""
            at = f"at evaluation {one.user_attrs.get(PRUNED_AT)}"
            yield one_line(f"pruned: trial {one.number}, {at}: {shown}".rstrip(": "))
    for one in trials:
        if one.state == TrialState.FAIL:
            yield one_line(f"failed: trial {one.number}: {one.user_attrs.get('reason', '')}")
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
        one for one in sweep.fit_line(_values(sweep, best, plugins=True)) if one != "--unlocked"
    ]
    return shlex.join(["eventloop", *argv])


def content_of(sweep: Sweep, study: optuna.Study, best: FrozenTrial | None) -> dict[str, Any]:
    """Returns the sweep as JSON can hold it."""
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
                "number": one.number,
                "state": one.state.name.lower(),
                "value": one.value,
                "options": one.params,
                "evaluations": one.intermediate_values,
                "reason": one.user_attrs.get("reason"),
                "pruned_at": one.user_attrs.get(PRUNED_AT),
            }
            for one in study.get_trials(deepcopy=False)
        ],
    }


def draw(study: optuna.Study, path: Path) -> bool:
    """Draws a study with Optuna's plots, one below the other; returns whether a trial is complete."""
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
        with contextlib.suppress(ValueError, RuntimeError):  # of too few trials
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
    """Returns the options of a trial as they are typed."""
    return {
        name: repr(value) if isinstance(value, float) else str(value)
        for name, value in best.params.items()
        if plugins or not name.startswith("-p ")
    }


def _config(sweep: Sweep, best: FrozenTrial) -> dict[str, Any]:
    """Returns the file for `--config` with which `fit` trains as a trial did."""
    layers = sweep.job.configuration.layers
    given = sweep.arguments.given
    # The first file is that of `--config`; others are read without being named.
    file = next(one for one in layers if one.kind == "file") if "config" in given else None
    values = {key: one.value for key, one in file.values.items()} if file else {}
    for key, text in (sweep.arguments.flags | _values(sweep, best)).items():
        values[key] = _plain(sweep.job.convert(key, text), text)
    values |= {"autoload": False} if "no_plugins" in given else {}
    rules = {key: one.value for key, one in file.rules.items()} if file else {}
    rules |= _lists(sweep, best)
    content: dict[str, Any] = {}
    sections: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (sections.setdefault(section, {}) if section else content)[name] = value
    content |= {"task": sections.pop("task")} if "task" in sections else {}
    # Where `plugins` is a list, their sections stand at the top.
    content |= sections if "plugins" in rules or not sections else {"plugins": sections}
    return content | rules


def _lists(sweep: Sweep, best: FrozenTrial) -> dict[str, list[str]]:
    """Returns the lists of plugins, with what weaker files list: the strongest file's counts."""
    rules = sweep.job.configuration.rules
    choice = sweep.arguments.choice
    off = {fold(one): one for one in choice.off} | sweep.switched_off(best.params)
    chosen = [str(value) for name, value in best.params.items() if name.startswith("-p ")]
    on = {fold(one): one for one in (*choice.insist, *chosen) if not one.startswith("no:")}
    on |= {fold(one.name): f"{one.name}{one.specifier}" for one in rules.required}
    required = [one for key, one in on.items() if key not in off]
    off = {key: one.value for key, one in rules.disable.items() if key not in on} | off
    local = sweep.job.configuration.local
    own = [one for one in local if not one.source or one.source != rules.site]
    plugins = [_label(one.label, one.folder) for one in own]
    lists = {"disable": [*off.values()], "required": required, "plugins": plugins}
    is_alone = "no_plugins" in sweep.arguments.given  # without what the project requires
    return {key: one for key, one in lists.items() if one or (key == "required" and is_alone)}


def _label(label: str, folder: Path) -> str:
    """Returns a plugin's label that is valid in another folder, too; a module's is."""
    path, end, name = label.partition(".py")
    return f"{Path(folder, path).resolve()}{end}{name}" if end else path


def _plain(value: object, text: str) -> object:
    """Returns a value of YAML; of another type its text, from which it is read again."""
    if value is None or type(value) in (bool, int, float):
        return value
    return str(value) if isinstance(value, Url) else text  # without its password
