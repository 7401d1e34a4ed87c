"""Opens a run: from the request to all parts built, and loaded if it is resumed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from eventloop.checkpoint.capture import described
from eventloop.checkpoint.locations import storage_of
from eventloop.checkpoint.structure import restore_trained
from eventloop.data.iterable_sources import restored_loader_state
from eventloop.data.loaders import first_batch
from eventloop.distributed import join_processes
from eventloop.distributed.consistency import require_same_run
from eventloop.errors import SettingError, a
from eventloop.files.run_folder import new_run_dir
from eventloop.naming import listed
from eventloop.plugin.assemble import Discovery, assemble, unsuitable_reasons
from eventloop.plugin.declared_hooks import HOOKS
from eventloop.plugin.passed import passed_plugins
from eventloop.plugin.plans import outcomes_of
from eventloop.plugin.plugin_attributes import facts_of
from eventloop.plugin.records import Plugin
from eventloop.plugin.validate import implementations
from eventloop.rng import kept_generators, seed_everything, seed_rank
from eventloop.run.differences import NOTHING, Allowed
from eventloop.run.resume import find_start
from eventloop.run.run_manifest import parameters_of
from eventloop.run.runtime import Run
from eventloop.run.start_checks import (
    check_eval_dataloaders,
    check_evaluation,
    check_memory,
    check_model,
    require_usable,
)
from eventloop.task import Task
from eventloop.task.default_name import name_of_hooks, name_of_model
from eventloop.training.compiling import require_layers
from eventloop.training.optimizers import check_optimizers

if TYPE_CHECKING:
    from pathlib import Path

    from eventloop.checkpoint.checkpoint_files import Checkpoint
    from eventloop.config.configuration import Configuration
    from eventloop.plugin.observe import Observer
    from eventloop.plugin.registry import Registry


@dataclass(frozen=True)
class Request:
    """What a run should be, as requested by Python or the command line.

    Args:
        task: see `Trainer`; likewise algorithms and callbacks.
        configuration: settings and options, including those from variables and files.
        observers: wrap the calls of hooks, such as `Check`.
        allowed: what may differ from the run that is resumed.
        origin: the task's entry in the manifest besides its settings, compared when the run is
            resumed: the digest of its file, its options. JSON values.
        discovery: the plugins that a command has already discovered and loaded.
        core: plugins to add to the core's own.
        checkpoint: where to begin if the run's folder has no checkpoint of its own.
        scratch: the run's folder if run_dir isn't set: of a command that trains nothing, one that it
            removes. None: a new folder.
        check_plugins: raises if the run must not train with these plugins; called before the model
            is built.
    """

    task: object
    configuration: Configuration
    algorithms: Sequence[object] = ()
    callbacks: Sequence[object] = ()
    observers: Sequence[Observer] = ()
    allowed: Allowed = NOTHING
    origin: Mapping[str, Any] | None = None
    discovery: Discovery | None = None
    core: Sequence[object] = ()
    checkpoint: Checkpoint | None = None
    scratch: Path | None = None
    check_plugins: Callable[[Registry], None] | None = None


def open_run(request: Request) -> Run:
    """Opens a run, up to its checkpoint; raises what can be found before training."""
    task = task_defaults_of(request.task)
    settings = request.configuration.settings(task.settings)
    processes = join_processes()
    usual_run_dir = request.scratch or new_run_dir(task.name)
    storage = storage_of(settings.run_dir, processes.from_first(usual_run_dir))
    require_usable(storage.run_dir)
    start = find_start(settings, storage, processes, request.allowed, request.checkpoint)
    configuration = start.narrowed(request.configuration.with_task(task.settings))
    # What the task has drawn depends on the program; what plugins draw when built must not.
    seed_everything(settings.seed)
    run = Run(request, configuration, settings, task, processes, storage, start)
    discovery = request.discovery or Discovery(configuration)
    registry = assemble(
        configuration,
        discovery,
        task=task_plugin(request.task),
        core=run.core_plugins,
        passed=[
            *passed_plugins(task.algorithms, "algorithm", discovery.found, "Task"),
            *passed_plugins(task.callbacks, "callback", discovery.found, "Task"),
            *passed_plugins(listed(request.algorithms, "algorithms"), "algorithm", discovery.found),
            *passed_plugins(listed(request.callbacks, "callbacks"), "callback", discovery.found),
        ],
    )
    registry.raise_problems()
    run.freeze(registry)
    with run.guarded(closing=True):
        if request.check_plugins is not None:
            request.check_plugins(run.active.assembly)
        require_same_run(processes, run.state.manifest)
        start.check(run.state.manifest)
        _build(run)
        start.load(run)
        run.active.plans.after_load(run.state)
        changes = run.capture.changed_structure
        restore_trained(run.state, changes)
        run.capture.structure.remember_trained(run.state, changes if start.resumed else None)
        check_evaluation(run)
    return run


def _build(run: Run) -> None:
    """Builds everything that a run needs, from the model to the metrics."""
    state = run.state
    hooks = run.active.plans
    # Once more: the model is the same whatever installed plugins drew when imported and built.
    run.processes.arrange(hooks.build_mesh(state), state.device)
    seed_everything(state.settings.seed)
    state.model = hooks.build_model(state)
    hooks.init(state)
    check_model(state, run.active.assembly)
    state.wrapped_model = hooks.wrap_model(state)
    require_layers(state)
    check_memory(state)
    state.optimizers = hooks.build_optimizers(state)
    check_optimizers(state)
    state.precision.check(state.model, state.optimizers)
    state.train_dataloader = hooks.build_train_dataloader(state)
    _drop_unsuitable(run)
    run.loop.feeds.take(state, state.train_dataloader)
    state.eval_dataloaders = hooks.build_eval_dataloaders(state)
    check_eval_dataloaders(state)
    state.eval_sets = [name for name in state.eval_dataloaders if name not in state.test_sets]
    state.schedulers = hooks.build_schedulers(state)
    datasets = ("train", *(f"eval/{name}" for name in state.eval_dataloaders))
    state.metrics = {name: hooks.build_metrics(state, name) for name in datasets}
    trained = {**run.task.described, "parameters": parameters_of(state.model)}
    known = {"optimizers": described(state.optimizers), "absent": [], "trained": trained}
    state.manifest = {**state.manifest, **known}
    run.capture.structure.remember(state)
    run.capture.objects.remember(state)
    seed_rank(state.settings.seed, state.data_rank)


def _drop_unsuitable(run: Run) -> None:
    """Deactivates plugins that say, given the first batch, that they can't be used."""
    if not run.active.assembly.implementations["unsuitable"].implementations:
        return
    state = run.state
    with kept_generators(), restored_loader_state(state.train_dataloader):
        first, state.train_dataloader = first_batch(state.train_dataloader)
    mine: dict[str, str] = {}
    if first is not None:
        state.batch = run.loop.move(first)
        answers = outcomes_of(run.active.plans.unsuitable, state)
        mine = unsuitable_reasons(answers, run.configuration.who_insists)
        state.batch = None
    # What doesn't suit one rank is off on all.
    reasons = {name: why for one in state.all_gather(mine) for name, why in one.items()}
    if reasons:
        run.freeze(run.active.assembly.without(reasons))


@dataclass(frozen=True)
class TaskDefaults:
    """What a task provides besides its hooks; empty for a task that is only hooks."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    algorithms: tuple[object, ...] = ()
    callbacks: tuple[object, ...] = ()
    name: str = ""
    criterion: Callable[[Any, Any], Tensor] | None = None
    counts_tokens: bool = True
    described: Mapping[str, str] = field(default_factory=dict)


def task_defaults_of(task: object) -> TaskDefaults:
    """Returns a task's defaults."""
    if isinstance(task, Task):
        return TaskDefaults(
            settings=task.settings,
            algorithms=task.algorithms,
            callbacks=task.callbacks,
            name=task.name or name_of_model(task.model),
            criterion=task.loss,
            counts_tokens=task.num_tokens is not None,
            described=task.described(),
        )
    return TaskDefaults(settings=facts_of(task).default_settings or {}, name=name_of_hooks(task))


def refuse_task_values(settings: Iterable[str]) -> None:
    """Raises SettingError if a setting is one of the task's values."""
    of_task = inspect.signature(Task).parameters
    for name in settings:
        if name in of_task:
            raise SettingError(
                f"{name} is a value of the task, not a setting", fix=f"write Task({name}=...)"
            )


def task_plugin(task: object) -> Plugin:
    """Creates the plugin of a task, first in order; raises TypeError if it isn't a task."""
    if isinstance(task, Task):
        return Plugin("task", "task", task.hooks())
    if isinstance(task, type):
        raise TypeError(f"Trainer was given the class {task.__name__}, not an instance of it")
    plugin = Plugin("task", "task", task)
    if "build_model" not in {one.hook.name for one in implementations(plugin, HOOKS)[0]}:
        given = a(type(task).__name__) if isinstance(task, nn.Module) else repr(task)
        hint = "; write Task(model=...)" if isinstance(task, nn.Module) else ""
        raise TypeError(
            "a task is a Task, or an object or module that implements build_model, not "
            f"{given}{hint}"
        )
    return plugin
