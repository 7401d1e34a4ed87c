"""A model of Composer's as a task of ours, from the arguments of Composer's trainer."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence, Sized
from typing import Any

from eventloop_composer.importing import import_composer

import_composer()

from composer.core import Algorithm, Callback, DataSpec, Evaluator, Event  # noqa: E402
from composer.core import State as ComposerState  # noqa: E402
from composer.loggers import (  # noqa: E402
    ConsoleLogger,
    Logger,
    LoggerDestination,
    ProgressBarLogger,
)
from composer.models import ComposerModel  # noqa: E402
from composer.optim import DecoupledSGDW  # noqa: E402
from composer.utils import ensure_tuple  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim import Optimizer  # noqa: E402
from torch.optim.lr_scheduler import LRScheduler  # noqa: E402

from eventloop import SettingError, Task, TaskError  # noqa: E402
from eventloop_composer.arguments import (  # noqa: E402
    checked,
    named_files,
    saver_of,
    settings_of,
)
from eventloop_composer.model_task import ModelTask, Parts, model_of  # noqa: E402
from eventloop_composer.named import objects_of  # noqa: E402
from eventloop_composer.plugin import Composer  # noqa: E402
from eventloop_composer.session import Session  # noqa: E402


def task(model: nn.Module, train_dataloader: Any = None, **arguments: Any) -> Task:
    """Returns the task of training a `ComposerModel`, with its algorithms and callbacks.

    Args:
        model: a model of Composer's.
        train_dataloader: its data, or a `DataSpec`; None where it comes with `Trainer.fit`.
        arguments: those of Composer's trainer, by their names.

    Raises:
        TypeError: Composer's trainer has no such argument.
        SettingError: one can't be honoured.
    """
    return built(model=model, train_dataloader=train_dataloader, **arguments)[0]


def built(**arguments: Any) -> tuple[Task, ModelTask, Composer]:
    """Returns the task, what it trains, and the plugin that runs Composer's objects."""
    given = checked(arguments)
    _set_log_level(given["python_log_level"])
    settings = settings_of(given)
    model = model_of(given["model"])
    algorithms = list(ensure_tuple(given["algorithms"]))
    if any(one.find_unused_parameters for one in algorithms):
        settings["find_unused_parameters"] = True
    profiler = given["profiler"]
    callbacks = [*ensure_tuple(given["callbacks"]), *_watching(profiler)]
    if named_files(given):
        callbacks.append(saver_of(given))
    names = (given["run_name"], os.getenv("COMPOSER_RUN_NAME"), os.getenv("RUN_NAME"))
    session = Session(
        objects_of("algorithms", algorithms, Algorithm),
        objects_of("callbacks", callbacks, Callback),
        objects_of("loggers", loggers_of(given), LoggerDestination),
        passes=given["algorithm_passes"],
        profiler=profiler,
        run_name=next((name for name in names if name), None),
    )
    model_task = ModelTask(session, parts_of(model, given))
    plugin = Composer.of(session, model_task)
    return _as_task(model, model_task, plugin, settings), model_task, plugin


def _watching(profiler: Any) -> list[Any]:
    """Returns what a profiler of Composer's adds to the callbacks, itself first.

    Raises:
        SettingError: it would upload its traces.
    """
    if profiler is None:
        return []
    if remote := [one for one in profiler.remote_filenames if "://" in one]:
        raise SettingError(
            f"profiler uploads to {', '.join(remote)}, which can't be honoured",
            fix="give its trace handlers no remote_file_name, and copy the folder after the run",
        )
    # Private: what it watches torch and the system with (Composer 0.32.1).
    return [profiler, *profiler._callbacks, *profiler.trace_handlers, _EveryEvent()]


class _EveryEvent(Callback):
    """Has every event fired: the engine marks them in pairs, whether or not a callback listens."""

    def run_event(self, event: Event, state: ComposerState, logger: Logger) -> None:
        """Does nothing."""


def parts_of(model: ComposerModel, given: Mapping[str, Any]) -> Parts:
    """Returns what is trained, from checked arguments."""
    schedulers = ensure_tuple(given["schedulers"])
    ratio = given["scale_schedule_ratio"]
    num_batches = given["train_subset_num_batches"]
    if ratio != 1.0 and not schedulers:
        raise SettingError(
            f"scale_schedule_ratio={ratio} has no effect without schedulers",
            fix="give schedulers, or max_duration alone",
        )
    size = given["device_train_microbatch_size"]
    loader = given["train_dataloader"]
    return Parts(
        data=None if loader is None else data_of(loader),
        label=given["train_dataloader_label"],
        num_batches=None if num_batches < 0 else num_batches,
        evaluators=evaluators_of(
            model,
            given["eval_dataloader"],
            given["eval_interval"],
            given["eval_subset_num_batches"],
        ),
        optimizers=_optimizers_of(model, given["optimizers"]),
        schedulers=schedulers,
        schedule_ratio=ratio,
        every_batch=moves_every_batch(schedulers, given["step_schedulers_every_batch"]),
        microbatch_size=None if size == "auto" else size,
        counts_tokens=given["accumulate_train_batch_on_tokens"],
        train_metrics=model.get_metrics(is_train=True) or {},
    )


def data_of(given: Any) -> DataSpec:
    """Returns the specification of data, made for a data loader that comes without one.

    Composer's own refuses a data loader that isn't shared out over the ranks; eventloop does that.
    """
    if isinstance(given, DataSpec):
        return given
    if isinstance(given, dict):
        return DataSpec(**given)
    data = DataSpec([])
    data.dataloader = given
    return data


def evaluators_of(
    model: ComposerModel, given: Any, interval: Any, num_batches: int
) -> list[Evaluator]:
    """Returns the evaluators; `interval` applies to those without an interval of their own.

    Raises:
        TaskError: some have a name and others don't, or one can't be honoured.
        SettingError: one has no length, and all of it is asked for.
    """
    sets = ensure_tuple(given)
    are_named = {isinstance(one, Evaluator) for one in sets}
    if len(are_named) > 1:
        raise TaskError(
            "some of eval_dataloader are Evaluators and others aren't", fix="wrap all in Evaluator"
        )
    names = [str(name) for name in model.get_metrics(is_train=False)] if sets else []
    evaluators = [
        one
        if isinstance(one, Evaluator)
        else Evaluator(label="eval", dataloader=data_of(one), metric_names=names)
        for one in sets
    ]
    for one in evaluators:
        if one.subset_num_batches is None:
            one.subset_num_batches = num_batches
        if one.eval_interval is None:
            one.eval_interval = interval
        _refuse_microbatches(one)
        _refuse_endless(one)
    return evaluators


def loggers_of(given: Mapping[str, Any]) -> list[LoggerDestination]:
    """Returns the loggers that were passed, and those that Composer's trainer adds."""
    loggers = list(ensure_tuple(given["loggers"]))
    stream = given["console_stream"]
    traces = given["log_traces"]
    if given["progress_bar"] and not any(isinstance(one, ProgressBarLogger) for one in loggers):
        loggers.append(ProgressBarLogger(stream=stream, log_traces=traces))
    if given["log_to_console"] and not any(isinstance(one, ConsoleLogger) for one in loggers):
        interval = given["console_log_interval"]
        loggers.append(ConsoleLogger(stream=stream, log_interval=interval, log_traces=traces))
    return loggers


def moves_every_batch(schedulers: Sequence[Any], given: bool | None) -> bool:
    """Whether schedulers step every batch; by default, only if none is a torch scheduler."""
    if given is not None:
        return given
    return not any(isinstance(one, LRScheduler) for one in schedulers)


def _optimizers_of(model: ComposerModel, given: Any) -> list[Optimizer]:
    optimizers: list[Optimizer] = list(ensure_tuple(given))
    if len(optimizers) > 1:
        raise TaskError(
            f"optimizers={len(optimizers)} of them; Composer's trainer takes one",
            fix="give one, or train a Task of eventloop, which takes several by name",
        )
    if not optimizers and any(True for _ in model.parameters()):
        warnings.warn("no optimizer was given: DecoupledSGDW(lr=0.1), as in Composer", stacklevel=2)
        return [DecoupledSGDW(model.parameters(), lr=0.1)]
    return optimizers


def _refuse_microbatches(evaluator: Evaluator) -> None:
    size = evaluator.device_eval_microbatch_size
    whole = getattr(evaluator.dataloader.dataloader, "batch_size", None)
    if evaluator.auto_microbatching or (whole is not None and size is not None and size < whole):
        raise TaskError(
            f"device_eval_microbatch_size={size} of {evaluator.label!r} can't be honoured: an eval "
            "batch goes through the model in one piece",
            fix="let its data loader make smaller batches",
        )


def _refuse_endless(evaluator: Evaluator) -> None:
    loader = evaluator.dataloader.dataloader
    if (
        isinstance(loader, Sized)
        and evaluator.subset_num_batches == -1
        and length_of(loader) is None
    ):
        raise SettingError(
            f"the data loader of eval set {evaluator.label!r} has no length: its evaluation may never end",
            fix="give eval_subset_num_batches",
        )


def length_of(loader: Any) -> int | None:
    """Returns how many batches a data loader has; None where it doesn't know."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _as_task(
    model: ComposerModel, model_task: ModelTask, plugin: Composer, settings: Mapping[str, Any]
) -> Task:
    parts = model_task.parts
    loader: Any = parts.data.dataloader if parts.data else None
    optimizer = parts.optimizers[0] if parts.optimizers else None
    return Task(
        model=model,
        # Without one, nothing: the data may come with a fit.
        train_dataloader=(lambda: ()) if loader is None else loader,
        eval_dataloaders={one.label: one.dataloader.dataloader for one in parts.evaluators} or None,
        optimizer=None if optimizer is None else lambda _: optimizer,
        algorithms=[plugin, model_task],
        # Algorithms that are installed would change what Composer trains.
        settings={"autoload": "callbacks", **settings},
        name=type(model).__name__,
    )


def _set_log_level(level: str | None) -> None:
    if level is not None:
        logging.basicConfig()
        logging.getLogger("composer").setLevel(level.upper())
