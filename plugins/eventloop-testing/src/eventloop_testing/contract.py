"""`check_plugin`: what must hold for any plugin, whatever it does."""

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

# A thread that was told to end may be asking other ranks something.
_ENDING_S = 3.0


def check_plugin(
    plugin: type,
    *,
    role: Role | None = None,
    options: Mapping[str, Any] | None = None,
    task: Callable[[], Task] = tiny_task,
    world_size: int = 1,
) -> None:
    """Checks what must hold for any plugin, in small runs on the CPU.

    Its options are documented and typed; two runs give the same weights, whatever the order in
    which it and others are handed over; no step reads the device; it closes after a run, without
    one, and after a failure. Its state can be saved, and a run that is stopped in the middle of an
    epoch and resumed, by instances built anew, has the weights, the logged numbers and the state of
    one in one go; on two ranks, too. It runs on the pretend accelerator, where no step waits, and is
    resumed there: what `load_state_dict` puts back belongs on the device. A
    callback changes nothing: no tensor is written, and the weights are those of a run without it,
    of the same length where it stops the run.

    Args:
        plugin: the class; built anew for each run.
        role: as the entry point says; needed where the plugin isn't installed.
        options: what it is built with; needed where an option has no default.
        task: makes the task, afresh for each run.
        world_size: how many ranks the runs have; for plugins that one process doesn't suit.

    Raises:
        AssertionError: something doesn't hold; the message lists everything.
        ValueError: `role` isn't given and it isn't installed under one.
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
    first = case.run(case.build())
    again = case.run(case.build())
    mine = [one for one in first.findings if one.plugin == case.found.origin]
    case.found_on_host |= {one.what for one in mine}
    yield from map(str, mine)
    if not equal(first.weights, again.weights):
        yield "two runs with one seed end with different weights; draw from state.generator(name)"
    if case.role == "callback" and not equal(first.weights, _without(case, first).weights):
        yield "a run with it ends with other weights than one without; a callback may only watch"


def _without(case: Case, run: Run) -> Run:
    """Trains without the plugin, as long as a run with it: a callback may stop one."""
    alone = case.run()
    is_stopped = run.num_batches < alone.num_batches
    return case.run(algorithms=(Stops(run.num_batches),)) if is_stopped else alone


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
    left = [thread for thread in threading.enumerate() if thread not in threads]
    for thread in left:
        thread.join(_ENDING_S)
    if names := [thread.name for thread in left if thread.is_alive()]:
        yield f"threads go on after close: {', '.join(names)}"


def _runs_on_an_accelerator(case: Case) -> Iterator[str]:
    # In a fork: torch takes the pretend accelerator for the process's own from then on.
    try:
        ((waits, error),) = run_ranks(_pretend_run, case, world_size=1)
    except (RankError, TimeoutError) as failure:
        error = f"a run with it fails: {failure}"
        waits = []
    if error:
        yield f"on the pretend accelerator {error}"
    yield from (f"on the pretend accelerator, {one}" for one in waits)


def _pretend_run(case: Case) -> tuple[list[str], str]:
    """Returns what is wrong in a step there and not on the CPU, and what made the run fail."""
    for name in rank_variables(0, 1, 0):
        os.environ.pop(name, None)
    case.folder = case.folder / "pretend"  # this process counts its folders by itself
    try:
        with pretend_device():
            run = case.run(case.build(), device="pretend", precision="fp32")
            failure = _pretend_resume(case) if case.is_resumed else ""
    except (PretendError, torch.OutOfMemoryError) as error:
        return [], f"a run with it fails: {type(error).__name__}: {text_of(error)}"
    mine = [one for one in run.findings if one.plugin == case.found.origin]
    waits = [str(one) for one in mine if one.what not in case.found_on_host]
    return waits, failure


def _pretend_resume(case: Case) -> str:
    """Returns what makes a resumed run fail there, though it can be resumed on the CPU; "" for nothing.

    A state that was loaded is on the host, where a checkpoint's tensors are.
    """
    try:
        resume_on(case, "pretend")
    except Exception as error:  # noqa: BLE001  whatever its author does there
        cause = error.__cause__ if isinstance(error, CheckpointError) else None
        first = cause or error
        return f"a run with it can't be resumed: {type(first).__name__}: {text_of(first)}"
    return ""


def _two_ranks_end_alike(case: Case) -> Iterator[str]:
    def train() -> tuple[dict[str, Tensor], list[str]]:
        with case.trainer(case.build()) as trainer:
            trainer.fit()
            weights = weights_of(trainer)
        # What is wrong in one process is told already.
        return weights, list(is_resumed(case)) if case.is_resumed else []

    try:
        (one, problems), (other, problems_of_other) = run_ranks(train)
    except (RankError, TimeoutError) as error:
        yield f"two ranks with it fail: {error}"
        return
    if not equal(one, other):
        yield "two ranks with it end with different weights; draw alike what changes the model"
    elif problems or problems_of_other:
        rank, found = (0, problems) if problems else (1, problems_of_other)
        yield from (f"on rank {rank} of two, {problem}" for problem in found)


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
    for found in discover()[0]:
        is_near = found.entry_point.module.partition(".")[0] == package
        if is_near and found.entry_point.load() is plugin:
            return "algorithm" if found.role == "algorithm" else "callback"
    raise ValueError(f'{plugin.__name__} isn\'t installed; give role="algorithm" or "callback"')
