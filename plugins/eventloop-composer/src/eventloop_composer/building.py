"""Builds an eventloop task for a model of Composer, from the arguments of Composer's trainer."""

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
        model: a model of Composer.
        train_dataloader: its data, or a `DataSpec`; None if it is passed to `Trainer.fit`.
        arguments: further arguments of Composer's trainer.

    Raises:
        TypeError: Composer's trainer has no such argument.
        SettingError: an argument can't be honoured.
    """
    return built(model=model, train_dataloader=train_dataloader, **arguments)[0]


def built(**arguments: Any) -> tuple[Task, ModelTask, Composer]:
    """Returns the task, its model task, and the plugin that runs Composer's objects."""
    checked_arguments = checked(arguments)
    _set_log_level(checked_arguments["python_log_level"])
    settings = settings_of(checked_arguments)
    model = model_of(checked_arguments["model"])
    algorithms = list(ensure_tuple(checked_arguments["algorithms"]))
    if any(algorithm.find_unused_parameters for algorithm in algorithms):
        settings["find_unused_parameters"] = True
    profiler = checked_arguments["profiler"]
    callbacks = [*ensure_tuple(checked_arguments["callbacks"]), *_watching(profiler)]
    if named_files(checked_arguments):
        callbacks.append(saver_of(checked_arguments))
    names = (checked_arguments["run_name"], os.getenv("COMPOSER_RUN_NAME"), os.getenv("RUN_NAME"))
    session = Session(
        objects_of("algorithms", algorithms, Algorithm),
        objects_of("callbacks", callbacks, Callback),
        objects_of("loggers", loggers_of(checked_arguments), LoggerDestination),
        passes=checked_arguments["algorithm_passes"],
        profiler=profiler,
        run_name=next((name for name in names if name), None),
    )
    model_task = ModelTask(session, parts_of(model, checked_arguments))
    plugin = Composer.of(session, model_task)
    return _as_task(model, model_task, plugin, settings), model_task, plugin


def _watching(profiler: Any) -> list[Any]:
    """Returns the callbacks that a profiler of Composer adds, itself first.

    Raises:
        SettingError: it would upload its traces.
    """
    if profiler is None:
        return []
    if remote := [name for name in profiler.remote_filenames if "://" in name]:
        raise SettingError(
            f"profiler uploads to {', '.join(remote)}, which can't be honoured",
            fix="give its trace handlers no remote_file_name, and copy the folder after the run",
        )
    # Private: the profiler's callbacks for torch and the system (Composer 0.32.1).
    return [profiler, *profiler._callbacks, *profiler.trace_handlers, _EveryEvent()]


class _EveryEvent(Callback):
    """Makes every event fire: the profiler records events in pairs, whether or not a callback listens."""

    def run_event(self, event: Event, state: ComposerState, logger: Logger) -> None:
        """Does nothing."""


def parts_of(model: ComposerModel, arguments: Mapping[str, Any]) -> Parts:
    """Returns the parts of the training, from checked arguments."""
    schedulers = ensure_tuple(arguments["schedulers"])
    ratio = arguments["scale_schedule_ratio"]
    num_batches = arguments["train_subset_num_batches"]
    if ratio != 1.0 and not schedulers:
        raise SettingError(
            f"scale_schedule_ratio={ratio} has no effect without schedulers",
            fix="give schedulers, or max_duration alone",
        )
    size = arguments["device_train_microbatch_size"]
    loader = arguments["train_dataloader"]
    return Parts(
        data=None if loader is None else data_of(loader),
        label=arguments["train_dataloader_label"],
        num_batches=None if num_batches < 0 else num_batches,
        evaluators=evaluators_of(
            model,
            arguments["eval_dataloader"],
            arguments["eval_interval"],
            arguments["eval_subset_num_batches"],
        ),
        optimizers=_optimizers_of(model, arguments["optimizers"]),
        schedulers=schedulers,
        schedule_ratio=ratio,
        every_batch=moves_every_batch(schedulers, arguments["step_schedulers_every_batch"]),
        microbatch_size=None if size == "auto" else size,
        counts_tokens=arguments["accumulate_train_batch_on_tokens"],
        train_metrics=model.get_metrics(is_train=True) or {},
    )


def data_of(data_or_spec: Any) -> DataSpec:
    """Returns the DataSpec of the data; makes one for a plain data loader.

    Composer's own function refuses a data loader without a distributed sampler; eventloop adds one.
    """
    if isinstance(data_or_spec, DataSpec):
        return data_or_spec
    if isinstance(data_or_spec, dict):
        return DataSpec(**data_or_spec)
    data = DataSpec([])
    data.dataloader = data_or_spec
    return data


def evaluators_of(
    model: ComposerModel, eval_data: Any, interval: Any, num_batches: int
) -> list[Evaluator]:
    """Returns the evaluators; `interval` applies to evaluators without their own interval.

    Raises:
        TaskError: only some are Evaluators, or one can't be honoured.
        SettingError: an evaluator without a length has no limit.
    """
    sets = ensure_tuple(eval_data)
    are_named = {isinstance(eval_set, Evaluator) for eval_set in sets}
    if len(are_named) > 1:
        raise TaskError(
            "some of eval_dataloader are Evaluators and others aren't", fix="wrap all in Evaluator"
        )
    names = [str(name) for name in model.get_metrics(is_train=False)] if sets else []
    evaluators = [
        eval_set
        if isinstance(eval_set, Evaluator)
        else Evaluator(label="eval", dataloader=data_of(eval_set), metric_names=names)
        for eval_set in sets
    ]
    for evaluator in evaluators:
        if evaluator.subset_num_batches is None:
            evaluator.subset_num_batches = num_batches
        if evaluator.eval_interval is None:
            evaluator.eval_interval = interval
        _refuse_microbatches(evaluator)
        _refuse_endless(evaluator)
    return evaluators


def loggers_of(arguments: Mapping[str, Any]) -> list[LoggerDestination]:
    """Returns the loggers that were passed, and those that Composer's trainer adds."""
    loggers = list(ensure_tuple(arguments["loggers"]))
    stream = arguments["console_stream"]
    traces = arguments["log_traces"]
    if arguments["progress_bar"] and not any(
        isinstance(logger, ProgressBarLogger) for logger in loggers
    ):
        loggers.append(ProgressBarLogger(stream=stream, log_traces=traces))
    if arguments["log_to_console"] and not any(
        isinstance(logger, ConsoleLogger) for logger in loggers
    ):
        interval = arguments["console_log_interval"]
        loggers.append(ConsoleLogger(stream=stream, log_interval=interval, log_traces=traces))
    return loggers


def moves_every_batch(schedulers: Sequence[Any], every_batch: bool | None) -> bool:
    """Whether schedulers step every batch; by default, only if none is a torch scheduler."""
    if every_batch is not None:
        return every_batch
    return not any(isinstance(scheduler, LRScheduler) for scheduler in schedulers)


def _optimizers_of(model: ComposerModel, optimizer_or_list: Any) -> list[Optimizer]:
    optimizers: list[Optimizer] = list(ensure_tuple(optimizer_or_list))
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
    batch_size = getattr(evaluator.dataloader.dataloader, "batch_size", None)
    if evaluator.auto_microbatching or (
        batch_size is not None and size is not None and size < batch_size
    ):
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
    """Returns the number of batches of a data loader; None if unknown."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _as_task(
    model: ComposerModel, model_task: ModelTask, plugin: Composer, settings: Mapping[str, Any]
) -> Task:
    training_parts = model_task.parts
    loader: Any = training_parts.data.dataloader if training_parts.data else None
    optimizer = training_parts.optimizers[0] if training_parts.optimizers else None
    return Task(
        model=model,
        # Empty without a data loader: the data may be passed to `fit`.
        train_dataloader=(lambda: ()) if loader is None else loader,
        eval_dataloaders={
            evaluator.label: evaluator.dataloader.dataloader
            for evaluator in training_parts.evaluators
        }
        or None,
        optimizer=None if optimizer is None else lambda _: optimizer,
        algorithms=[plugin, model_task],
        # Installed algorithms would change the results of existing Composer code.
        settings={"autoload": "callbacks", **settings},
        name=type(model).__name__,
    )


def _set_log_level(level: str | None) -> None:
    if level is not None:
        logging.basicConfig()
        logging.getLogger("composer").setLevel(level.upper())
