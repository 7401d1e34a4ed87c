"""`check_plugin`: the contract of every plugin."""

from __future__ import annotations

import functools
import inspect
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eventloop.distributed import rank_variables
from eventloop.errors import CheckpointError, EventloopError, notes_of, text_of
from eventloop.plugin.build import plugin_options
from eventloop.plugin.discover import discover
from eventloop_testing.case import (
    Case,
    ExpectedError,
    Fails,
    Other,
    Role,
    Run,
    Stops,
    equal,
    tiny_task,
    weights_of,
)
from eventloop_testing.pretend import PretendError, pretend_device
from eventloop_testing.ranks import RankError, run_ranks
from eventloop_testing.resuming import is_resumed, resume_on

if TYPE_CHECKING:
    from eventloop.task import Task

# A stopped thread may first have to finish an exchange with other ranks.
_ENDING_S = 3.0


def check_plugin(
    plugin: type,
    *,
    role: Role | None = None,
    options: Mapping[str, Any] | None = None,
    task: Callable[[], Task] = tiny_task,
    world_size: int = 1,
) -> None:
    """Checks the contract of every plugin, in small runs on the CPU.

    Options are documented and typed. Two runs end with the same weights, in whatever order plugins are
    passed. No step reads from the device. The plugin closes after a run, without a run, and after a
    failure. A run that is stopped in the middle of an epoch and resumed by new instances ends with
    the weights, logged numbers and plugin state of an uninterrupted run, on two ranks, too. On the
    pretend accelerator no step synchronizes, and a run resumes: tensors that `load_state_dict`
    restores must be moved to the device. A callback changes nothing: it writes to no tensor, and
    the weights equal those of a run without it (of the same length, if it stops the run).

    Args:
        plugin: the class; a new instance is built for each run.
        role: role in the entry point; required if the plugin isn't installed.
        options: options of the instances; required if an option has no default.
        task: makes a new task for each run.
        world_size: number of ranks of the runs; for plugins that can't run in a single process.

    Raises:
        AssertionError: the contract is violated; the message lists all violations.
        ValueError: `role` isn't given, and the plugin isn't installed.
    """
    role = role or _installed_role(plugin)
    with tempfile.TemporaryDirectory(prefix="eventloop-check-") as folder:
        case = functools.partial(Case, plugin, role, dict(options or {}), task, Path(folder))
        if world_size == 1:
            problems = _problems(case, (*_CHECKS, _runs_on_an_accelerator, _two_ranks_end_alike))
        else:
            problems, *_ = run_ranks(_problems, case, _CHECKS, world_size=world_size)
    if problems:
        listed = "\n".join(f"{idx}. {problem}" for idx, problem in enumerate(problems, 1))
        raise AssertionError(f"{plugin.__name__} isn't what every plugin must be\n{listed}")


def _options(case: Case) -> Iterator[str]:
    parameters = inspect.signature(case.plugin).parameters
    for option in plugin_options(case.plugin).values():
        if parameters[option.name].annotation is inspect.Parameter.empty:
            yield f"option {option.name} has no type; annotate it in __init__"
        if not option.doc:
            yield f"option {option.name} isn't documented; add it to Args: in the class's docstring"


def _leaves_the_step_alone(case: Case) -> Iterator[str]:
    run = case.run(case.build())
    repeated_run = case.run(case.build())
    findings = [finding for finding in run.findings if finding.plugin == case.record.origin]
    case.found_on_host |= {finding.what for finding in findings}
    yield from map(str, findings)
    if not equal(run.weights, repeated_run.weights):
        yield "two runs with one seed end with different weights; draw from state.generator(name)"
    if case.role == "callback" and not equal(run.weights, _without(case, run).weights):
        yield "a run with it ends with other weights than one without; a callback may only watch"


def _without(case: Case, run: Run) -> Run:
    """Trains without the plugin, for as many batches as with it: a callback may stop a run early."""
    run_without = case.run()
    is_stopped = run.num_batches < run_without.num_batches
    return case.run(algorithms=(Stops(run.num_batches),)) if is_stopped else run_without


def _runs_alike_in_any_order(case: Case) -> Iterator[str]:
    names = ("aa-other", "zz-other")
    runs = [
        case.run(case.build(), algorithms=tuple(Other(name) for name in order))
        for order in (names, names[::-1])
    ]
    if runs[0].called != runs[1].called:
        yield "the order of calls depends on the order in which plugins are handed over"
    if not equal(runs[0].weights, runs[1].weights):
        yield "the weights depend on the order in which plugins are handed over"


def _closes(case: Case) -> Iterator[str]:
    threads = set(threading.enumerate())
    unused = case.trainer(case.build())
    unused.close()
    unused.close()
    try:
        with case.trainer(case.build(), algorithms=(Fails(2),)) as trainer:
            trainer.fit()
    except ExpectedError as error:
        yield from (
            f"after another plugin's failure it fails, too: {note}"
            for note in notes_of(error, "later")
        )
    new_threads = [thread for thread in threading.enumerate() if thread not in threads]
    for thread in new_threads:
        thread.join(_ENDING_S)
    if names := [thread.name for thread in new_threads if thread.is_alive()]:
        yield f"threads go on after close: {', '.join(names)}"


def _runs_on_an_accelerator(case: Case) -> Iterator[str]:
    # In a fork, because torch can't unregister the pretend accelerator from a process.
    try:
        ((waits, error),) = run_ranks(_pretend_run, case, world_size=1)
    except (RankError, TimeoutError) as failure:
        error = f"a run with it fails: {failure}"
        waits = []
    if error:
        yield f"on the pretend accelerator {error}"
    yield from (f"on the pretend accelerator, {wait}" for wait in waits)


def _pretend_run(case: Case) -> tuple[list[str], str]:
    """Returns the violations found only on the pretend accelerator, and the error of a failing run."""
    for name in rank_variables(0, 1, 0):
        os.environ.pop(name, None)
    case.folder = case.folder / "pretend"  # folders are numbered per process
    try:
        with pretend_device():
            run = case.run(case.build(), device="pretend", precision="fp32")
            failure = _pretend_resume(case) if case.is_resumed else ""
    except (PretendError, torch.OutOfMemoryError) as error:
        return [], f"a run with it fails: {type(error).__name__}: {text_of(error)}"
    findings = [finding for finding in run.findings if finding.plugin == case.record.origin]
    waits = [str(finding) for finding in findings if finding.what not in case.found_on_host]
    return waits, failure


def _pretend_resume(case: Case) -> str:
    """Returns the error of a run that resumes on the CPU but not on the pretend accelerator; "" if none.

    Checkpoints are loaded to the host, so a plugin that doesn't move its restored tensors fails here.
    """
    try:
        resume_on(case, "pretend")
    except Exception as error:  # noqa: BLE001  a plugin may raise anything
        cause = error.__cause__ if isinstance(error, CheckpointError) else None
        original_error = cause or error
        return f"a run with it can't be resumed: {type(original_error).__name__}: {text_of(original_error)}"
    return ""


def _two_ranks_end_alike(case: Case) -> Iterator[str]:
    def train() -> tuple[dict[str, Tensor], list[str]]:
        with case.trainer(case.build()) as trainer:
            trainer.fit()
            weights = weights_of(trainer)
        # Problems of a single process are reported already.
        return weights, list(is_resumed(case)) if case.is_resumed else []

    try:
        (weights, problems), (weights_of_other, problems_of_other) = run_ranks(train)
    except (RankError, TimeoutError) as error:
        yield f"two ranks with it fail: {error}"
        return
    if not equal(weights, weights_of_other):
        yield "two ranks with it end with different weights; draw alike what changes the model"
    elif problems or problems_of_other:
        rank, problems_of_rank = (0, problems) if problems else (1, problems_of_other)
        yield from (f"on rank {rank} of two, {problem}" for problem in problems_of_rank)


_CHECKS = (
    _options,
    _leaves_the_step_alone,
    _runs_alike_in_any_order,
    _closes,
    is_resumed,
)


def _problems(
    make_case: Callable[[], Case], checks: Iterable[Callable[[Case], Iterator[str]]]
) -> list[str]:
    try:
        case = make_case()
    except EventloopError as error:
        return [f"no trainer can be built with it: {error}"]
    return [problem for check in checks for problem in check(case)]


def _installed_role(plugin: type) -> Role:
    package = plugin.__module__.partition(".")[0]
    for installed_plugin in discover()[0]:
        is_near = installed_plugin.entry_point.module.partition(".")[0] == package
        if is_near and installed_plugin.entry_point.load() is plugin:
            return "algorithm" if installed_plugin.role == "algorithm" else "callback"
    raise ValueError(f'{plugin.__name__} isn\'t installed; give role="algorithm" or "callback"')
