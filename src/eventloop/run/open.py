"""Opens a run: builds everything that a request asks for, and loads the checkpoint of a resumed run."""

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
    """The description of a run, from Python or the command line.

    Args:
        task: see `Trainer`, as for algorithms and callbacks.
        configuration: settings and options, including those from variables and files.
        observers: wrap the calls of hooks, such as `Check`.
        allowed: the differences with which the run may be resumed.
        origin: the task's entry in the manifest, except for its settings, which is compared when the
            run is resumed: the digest of its file, its options. JSON values.
        discovery: the plugins that a command has already discovered and loaded.
        core: plugins to add to the core's plugins.
        checkpoint: the checkpoint to begin with if the run's folder has none.
        scratch: the run's folder if run_dir isn't set, for commands that train nothing and remove the
            folder. None: a new folder.
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
    """Opens a run and loads its checkpoint, if any; raises all errors that can be found before training.

    Raises:
        EventloopError: settings, plugins, task, data or checkpoint don't fit together; the plugins
            have been closed.
    """
    task = task_defaults_of(request.task)
    settings = request.configuration.settings(task.settings)
    processes = join_processes()
    default_run_dir = request.scratch or new_run_dir(task.name)
    # The default has a random part, so all ranks take rank 0's.
    storage = storage_of(settings.run_dir, processes.from_first(default_run_dir))
    require_usable(storage.run_dir)
    start = find_start(settings, storage, processes, request.allowed, request.checkpoint)
    configuration = start.narrowed(request.configuration.with_task(task.settings))
    # Random numbers that plugins draw in their constructors must depend only on the seed, not on the
    # numbers that the program has drawn before.
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
    run.processes.arrange(hooks.build_mesh(state), state.device)
    # Seeded once more: the model's initial weights must not depend on numbers that plugins have drawn.
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
    state.manifest = {
        **state.manifest,
        "optimizers": described(state.optimizers),
        "absent": [],
        "trained": {**run.task.described, "parameters": parameters_of(state.model)},
    }
    run.capture.structure.remember(state)
    run.capture.objects.remember(state)
    # Everything before is the same on all ranks; from here on dropout and augmentation differ.
    seed_rank(state.settings.seed, state.data_rank)


def _drop_unsuitable(run: Run) -> None:
    """Deactivates plugins whose `unsuitable` hook gives a reason, after reading the first batch."""
    if not run.active.assembly.implementations["unsuitable"].implementations:
        return
    state = run.state
    # Reading a batch draws random numbers and moves the loader on; training must not notice.
    with kept_generators(), restored_loader_state(state.train_dataloader):
        batch, state.train_dataloader = first_batch(state.train_dataloader)
    rank_reasons: dict[str, str] = {}
    if batch is not None:
        state.batch = run.loop.move(batch)
        answers = outcomes_of(run.active.plans.unsuitable, state)
        rank_reasons = unsuitable_reasons(answers, run.configuration.who_insists)
        state.batch = None
    # A plugin that is unsuitable on one rank is deactivated on all ranks, which must run the same hooks.
    reasons: dict[str, str] = {}
    for reasons_of_rank in state.all_gather(rank_reasons):
        reasons |= reasons_of_rank
    if reasons:
        run.freeze(run.active.assembly.without(reasons))


@dataclass(frozen=True)
class TaskDefaults:
    """The values that a task provides in addition to its hooks; empty for a task that only has hooks."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    algorithms: tuple[object, ...] = ()
    callbacks: tuple[object, ...] = ()
    name: str = ""
    criterion: Callable[[Any, Any], Tensor] | None = None
    counts_tokens: bool = True
    described: Mapping[str, str] = field(default_factory=dict)


def task_defaults_of(task: object) -> TaskDefaults:
    """Returns the values of a `Task`, or the default settings of another task."""
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
    """Raises SettingError if a name of a setting is a parameter of `Task`."""
    task_params = inspect.signature(Task).parameters
    for name in settings:
        if name in task_params:
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
    plugin_implementations, *_ = implementations(plugin, HOOKS)
    if all(implementation.hook.name != "build_model" for implementation in plugin_implementations):
        actual = repr(task)
        if isinstance(task, nn.Module):
            actual = f"{a(type(task).__name__)}; write Task(model=...)"
        raise TypeError(
            f"a task is a Task, or an object or module that implements build_model, not {actual}"
        )
    return plugin
