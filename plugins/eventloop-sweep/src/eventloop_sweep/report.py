"""What came of a sweep: the best trial as a line to paste and a file, counts, plots."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import yaml  # type: ignore[import-untyped]
from optuna.trial import FrozenTrial, TrialState

from eventloop.commands import UsageError, counted, one_line
from eventloop_sweep.pruning import PRUNED_AT
from eventloop_sweep.request import Sweep

METRIC = "metric"  # of a study: its name
_BEST = "best.yaml"


def header(sweep: Sweep, study: optuna.Study, num_left: int) -> Iterator[str]:
    """Yields the lines printed before the first trial."""
    at_once = f", {sweep.jobs} at a time" if sweep.jobs > 1 else ""
    yield f"sweep: {sweep.arguments.task}, {counted(sweep.num_trials, 'trial')}{at_once}"
    for one in sweep.dimensions:
        yield f"  {one.name}: {one}"
    yield (
        f"study: {study.study_name}, {study.direction.name.lower()} "
        f"{study.user_attrs[METRIC]}, {type(study.sampler).__name__}, "
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
        config = sweep.arguments.path("config")
        content = yaml.safe_load(config.read_text(encoding="utf-8")) if config else {}
        for key, text in sweep.arguments.flags.items() | _values(sweep, best).items():
            _put(content, key, _plain(sweep.job.convert(key, text)))
        chosen = [*sweep.arguments.choice.off, *sweep.switched_off(best.params).values()]
        content |= {"disable": chosen} if chosen else {}
        wanted = [*sweep.arguments.choice.insist, *_on(best)]
        content |= {"required": wanted} if wanted else {}
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


def require_plots() -> None:
    """Checks that plots can be drawn, before anything is trained.

    Raises:
        UsageError: they can't.
    """
    for name in ("matplotlib", "sklearn"):
        if importlib.util.find_spec(name) is None:
            raise UsageError(
                f"--plot needs {name}, which isn't installed",
                fix='`pip install "eventloop-sweep[plot]"`, or leave --plot out',
            )


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


def _chosen(best: FrozenTrial) -> list[str]:
    return [str(value) for name, value in best.params.items() if name.startswith("-p ")]


def _on(best: FrozenTrial) -> list[str]:
    return [one for one in _chosen(best) if not one.startswith("no:")]


def _put(content: dict[str, Any], key: str, value: object) -> None:
    section, _, name = key.rpartition(".")
    if section == "task":
        content.setdefault("task", {})[name] = value
    elif section:
        content.setdefault("plugins", {}).setdefault(section, {})[name] = value
    else:
        content[name] = value


def _plain(value: object) -> object:
    return value if isinstance(value, bool | int | float | None) else str(value)
