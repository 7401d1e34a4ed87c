"""How a run is opened: from what is asked for to everything built, and loaded where it goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eventloop.checkpoint.storage import new_run_dir, storage_of
from eventloop.distributed.consistency import require_same_run
from eventloop.distributed.join import join_processes
from eventloop.naming import listed
from eventloop.plugin.manager import assemble
from eventloop.rng import seed_everything
from eventloop.run.build import build
from eventloop.run.checks import check_evaluation, require_usable
from eventloop.run.find import find_start
from eventloop.run.runtime import Run
from eventloop.run.start import NOTHING, Allowed
from eventloop.task.task_defaults import task_defaults_of, task_plugin

if TYPE_CHECKING:
    from eventloop.config.configuration import Configuration
    from eventloop.plugin.candidates import Candidates
    from eventloop.plugin.observe import Observer


@dataclass(frozen=True)
class Request:
    """What is asked of a run, by Python and the command line alike.

    Args:
        task: see `Trainer`, as for algorithms and callbacks.
        configuration: settings and options, with what environment and files say.
        observers: what looks on while hooks are called, `Check`, say.
        allowed: what may differ from the run that is resumed.
        origin: what the manifest says of the task beside its settings, for a comparison when the
            run is resumed: the digest of its file, its options. Values that JSON can hold.
        candidates: the plugins that a command has discovered and loaded already.
        core: plugins that take part beside the core's own.
    """

    task: object
    configuration: Configuration
    algorithms: Sequence[object] = ()
    callbacks: Sequence[object] = ()
    observers: Sequence[Observer] = ()
    allowed: Allowed = NOTHING
    origin: Mapping[str, Any] | None = None
    candidates: Candidates | None = None
    core: Sequence[object] = ()


def open_run(request: Request) -> Run:
    """Opens a run: finds where it starts, chooses its plugins, builds its parts, loads a checkpoint.

    Raises:
        EventloopError: something is wrong that can be known before training.
    """
    task = task_defaults_of(request.task)
    settings = request.configuration.settings(task.settings)
    processes = join_processes()
    storage = storage_of(settings.run_dir, processes.from_first(new_run_dir(task.name)))
    require_usable(storage.run_dir)
    start = find_start(settings, storage, processes, request.allowed)
    configuration = start.narrowed(request.configuration)
    # What the task has drawn depends on the program; what plugins draw when built must not.
    seed_everything(settings.seed)
    run = Run(request, configuration, settings, task, processes, storage, start)
    run.freeze(
        assemble(
            configuration,
            candidates=request.candidates,
            task=task_plugin(request.task),
            core=run.core_plugins,
            algorithms=listed(request.algorithms, "algorithms"),
            callbacks=listed(request.callbacks, "callbacks"),
            of_task=(task.algorithms, task.callbacks),
        )
    )
    with run.guarded(closing=True):
        require_same_run(processes, run.state.manifest)
        start.check(run.state.manifest)
        build(run)
        start.load(run)
        run.active.plans.after_load(run.state)
        check_evaluation(run)
    return run
