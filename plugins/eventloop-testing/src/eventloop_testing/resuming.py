"""Checks that a run stopped or killed, and resumed in another process, equals an unbroken one."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from eventloop.checkpoint.checkpoint_files import Checkpoint, read_checkpoint, write_checkpoint
from eventloop.checkpoint.encoding import flatten, restore
from eventloop.checkpoint.part_differences import ValueDifference, differences
from eventloop.checkpoint.verifying import name_of
from eventloop.errors import CheckpointError, text_of
from eventloop.hook_markers import hookimpl
from eventloop.naming import fold
from eventloop.plugin.mistakes import keeps_state
from eventloop.training.tensor_slices import held
from eventloop_testing.case import Case, ExpectedError, Fails, equal, weights_of

if TYPE_CHECKING:
    from eventloop.state import State
    from eventloop.trainer import Trainer

Numbers = dict[tuple[int, str], Any]  # and texts
_DURATION = "3ep"  # half of it is in the middle of the second
_STATUS = 9
_STOP_ON_DEVICE = (
    2  # in the first epoch: two batches may be all that a short one has before its end
)


def is_resumed(case: Case) -> Iterator[str]:
    """Compares runs in one go with one that was stopped in the middle of an epoch.

    Its state is saved and restored by that. What two runs in one go don't share, seconds say, isn't compared.
    """
    try:
        whole = _in_one_go(case)
        again = _in_one_go(case)
    except CheckpointError as error:  # on all ranks
        yield text_of(error).partition("\n")[0]
        return
    batch = whole.num_batches // 2
    try:
        resumed = _resumed(case, batch)
    except Exception as error:  # noqa: BLE001  whatever its author does there
        # What load_state_dict raises of a value comes as a CheckpointError that names the value.
        own = error.__cause__ if isinstance(error, CheckpointError) else None
        first = own or error
        yield f"a run with it can't be resumed: {type(first).__name__}: {text_of(first)}"
        return
    if resumed.lost:
        yield f"what load_state_dict was given isn't what state_dict gives then: {resumed.lost}"
    problems = list(_differing(whole, again, resumed))
    case.is_resumed = not (problems or resumed.lost)
    # One rank alone can't look.
    if problems and whole.world_size == 1 and not _task_is_resumed(case, batch):
        yield "the task isn't resumed exactly, with it or without; give another one with task="
        return
    for problem in problems:
        yield f"a run that is stopped after batch {batch} and resumed {problem}; {_advice(case)}"


def resume_on(case: Case, device: str) -> None:
    """Stops a run in the middle of an epoch and resumes it, on a device; raises what it raises."""
    given: dict[str, Any] = {
        "folder": case.new_folder(),
        "max_duration": _DURATION,
        "device": device,
        "precision": "fp32",
        "callbacks": (_Saves(_STOP_ON_DEVICE),),
    }
    stop = (Fails(_STOP_ON_DEVICE + 1),)
    with (
        contextlib.suppress(ExpectedError),
        case.trainer(case.build(), algorithms=stop, **given) as trainer,
    ):
        trainer.fit()
    with (
        warnings.catch_warnings(),
        case.trainer(case.build(), algorithms=(Fails(-1),), **given) as trainer,
    ):
        # Of a plugin that has stopped the run.
        warnings.filterwarnings("ignore", message="nothing to train")
        trainer.fit()


class _Outcome(NamedTuple):
    """What a run ends with, on one rank."""

    weights: dict[str, Tensor]
    numbers: Numbers
    state: Any
    num_batches: int
    world_size: int
    lost: str = ""  # what of its state hadn't come back when a run was loaded


class _Records:
    """A callback that keeps numbers and texts by moment and name; a later one takes the place."""

    name = "check-plugin-records"

    def __init__(self) -> None:
        self.numbers: Numbers = {}

    @hookimpl
    def log(self, state: Any, numbers: Mapping[str, float], at: Any) -> None:
        self.numbers |= {(at.batch, name): value for name, value in numbers.items()}

    @hookimpl
    def log_text(self, state: Any, texts: Mapping[str, Any], at: Any) -> None:
        self.numbers |= {(at.batch, name): text for name, text in texts.items()}


class _Saves:
    """A callback that wants one checkpoint."""

    name = "check-plugin-saves"

    def __init__(self, batch: int) -> None:
        self.batch = batch

    @hookimpl
    def should_checkpoint(self, state: Any) -> bool:
        return bool(state.clock.batch == self.batch)


def _in_one_go(case: Case) -> _Outcome:
    plugin = case.build()
    records = _Records()
    with case.trainer(plugin, callbacks=(records,), max_duration=_DURATION) as trainer:
        return _outcome(case, trainer, plugin, records)


def _resumed(case: Case, batch: int, *, alone: bool = False) -> _Outcome:
    """Trains until one batch after a checkpoint, then resumes with everything rebuilt.

    Args:
        alone: without the plugin.
    """
    folder = case.new_folder()
    records = _Records()
    plugins = () if alone else (case.build(),)
    given: dict[str, Any] = {"folder": folder, "max_duration": _DURATION}
    given["callbacks"] = (_Saves(batch), records)
    stop = (Fails(batch + 1),)
    with (
        contextlib.suppress(ExpectedError),
        case.trainer(*plugins, algorithms=stop, **given) as trainer,
    ):
        trainer.fit()
    records.numbers = {at: value for at, value in records.numbers.items() if at[0] <= batch}
    plugin = None if alone else case.build()
    plugins = () if alone else (plugin,)
    # A run goes on with the algorithms that it had.
    with case.trainer(*plugins, algorithms=(Fails(-1),), **given) as trainer:
        lost = "" if alone else _lost(case, trainer, plugin, batch)
        return _outcome(case, trainer, plugin, records)._replace(lost=lost)


def _lost(case: Case, trainer: Trainer, plugin: Any, batch: int) -> str:
    """Returns what of a state that was loaded differs from what was saved."""
    if not _is_saved(case, trainer):
        return ""
    parts = read_checkpoint(trainer.state.run_dir / "checkpoints" / name_of(batch)).parts
    if case.found.facts.state_per_rank:
        parts = parts[f"rank{trainer.state.rank}"]
    saved = parts["plugins"][fold(case.found.name)]["state"]
    return _difference(saved, _as_saved(plugin), times=True)


def _outcome(case: Case, trainer: Trainer, plugin: Any, records: _Records) -> _Outcome:
    trainer.fit()
    num_batches = trainer.state.clock.batch
    world_size = trainer.state.world_size
    state = _as_saved(plugin) if plugin is not None and keeps_state(case.found) else None
    state = state if _is_saved(case, trainer) else None
    return _Outcome(weights_of(trainer), records.numbers, state, num_batches, world_size)


def _is_saved(case: Case, trainer: Trainer) -> bool:
    """Returns whether this rank's state counts: what rank 0 keeps for all may be of no use here."""
    return keeps_state(case.found) and (case.found.facts.state_per_rank or not trainer.state.rank)


def _differing(whole: _Outcome, again: _Outcome, resumed: _Outcome) -> Iterator[str]:
    """Yields where the resumed run differs although two uninterrupted runs agree."""
    if equal(whole.weights, again.weights) and not equal(whole.weights, resumed.weights):
        yield "ends with other weights than one in one go"
    for at in sorted(whole.numbers.keys() | resumed.numbers.keys()):
        first, second, third = (one.numbers.get(at) for one in (whole, again, resumed))
        if not _difference(first, second) and _difference(first, third):
            batch, name = at
            yield f"logs {third} as {name!r} at batch {batch}, where one in one go logs {first}"
            break
    difference = _difference(whole.state, resumed.state)
    if difference and not _difference(whole.state, again.state):
        yield f"ends with another state_dict() than one in one go: {difference}"


def _task_is_resumed(case: Case, batch: int) -> bool:
    """Returns whether the task by itself is resumed exactly, so that the plugin is to blame."""
    with case.trainer(max_duration=_DURATION) as trainer:
        trainer.fit()
        whole = weights_of(trainer)
    return equal(whole, _resumed(case, batch, alone=True).weights)


def _advice(case: Case) -> str:
    if not keeps_state(case.found):
        return (
            "what it keeps from batch to batch belongs in state_dict() and "
            "load_state_dict(state, version)"
        )
    fix = "something that it keeps isn't in state_dict(), or doesn't come back"
    if not case.found.facts.state_per_rank:
        fix += "; where each rank keeps something else, write state_per_rank = True"
    return fix


def _as_saved(plugin: Any) -> Any:
    """Returns the state of a plugin as it would be loaded from a checkpoint.

    Raises:
        CheckpointError: it can't be saved.
    """
    tensors, skeleton = flatten(plugin.state_dict(), "state_dict()")
    return restore(skeleton, {name: one.clone() for name, one in held(tensors).items()})


def _difference(one: Any, other: Any, *, times: bool = False) -> str:
    """Returns where two nests differ first; "" where they don't. Seconds don't count."""
    for found in differences({"state": one}, {"state": other}, times=times):
        if found.of_one_run == "seconds":
            continue
        path = found.path.removeprefix("state").lstrip("/")
        return f"{path or 'it'} is {found.second}, not {found.first}"
    return ""


class Dies:
    """An algorithm that ends its process in the middle of a batch, as a kill does: nothing is closed.

    Args:
        batch: how many are done by then; None: never, for the run that is resumed.
        raises: what is raised instead, for a run that ends in order.
    """

    name = "dies"
    free_options = ("batch", "raises")

    def __init__(
        self, batch: int | None = None, *, raises: type[BaseException] | None = None
    ) -> None:
        self.batch = batch
        self.raises = raises

    @hookimpl
    def after_train_batch(self, state: State) -> None:
        """Ends the process, or the run, when it is time."""
        if state.clock.batch == self.batch:
            if self.raises is not None:
                raise self.raises
            os._exit(_STATUS)


def fit_and_die(fit: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Calls a function, in which `Dies` strikes, in a fork of this process.

    Args:
        args, kwargs: what it is called with.

    Raises:
        AssertionError: it returned or raised; what it raised is printed.
    """
    child = os.fork()
    if not child:
        torch.set_num_threads(1)  # a fork has none of the threads of the pool
        gc.freeze()  # garbage of the parent may need its threads to go
        try:
            fit(*args, **kwargs)
        except BaseException:  # noqa: BLE001  nothing else prints it
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != _STATUS:
        raise AssertionError(f"{fit!r} ended with {status}: no process was killed in it")


def last_checkpoint(folder: Path) -> Checkpoint:
    """Reads the newest checkpoint of the run that an `isolated_trainer` has in a folder."""
    return read_checkpoint(max((folder / "run" / "checkpoints").glob("ba*")))


class KilledRuns:
    """Runs of one kind: one in one go, and others that are killed, resumed and compared with it.

    Args:
        fit: trains in a folder with `Dies(batch)` among the algorithms: `fit(folder, batch, *args)`.
        folder: of the run in one go, which is trained at once.
        args: what `fit` is called with beside.

    Attributes:
        folder, args: as given.
        whole: the last checkpoint of the run in one go.
    """

    def __init__(self, fit: Callable[..., object], folder: Path, *args: Any) -> None:
        self._fit = fit
        self.folder = folder
        self.args = args
        fit(folder, None, *args)
        self.whole = last_checkpoint(folder)

    def differing(
        self, folder: Path, *batches: int, forget: Callable[[dict[str, Any]], object] | None = None
    ) -> list[ValueDifference]:
        """Kills a run at batches, resumes it each time, and in the end without a kill.

        Args:
            folder: of that run.
            forget: takes something out of the parts of its last checkpoint before the end.

        Returns:
            What differs between its last checkpoint and that of the run in one go.
        """
        for batch in batches:
            fit_and_die(self._fit, folder, batch, *self.args)
        if forget is not None:
            with edited_checkpoint(folder) as checkpoint:
                forget(checkpoint.parts)
        self._fit(folder, None, *self.args)
        return list(differences(self.whole.parts, last_checkpoint(folder).parts))


@contextmanager
def edited_checkpoint(folder: Path) -> Iterator[Checkpoint]:
    """Yields the newest checkpoint, and saves it as edited: to forget something on purpose."""
    checkpoint = last_checkpoint(folder)
    yield checkpoint
    shutil.rmtree(checkpoint.path)
    write_checkpoint(checkpoint.path, checkpoint.parts, checkpoint.facts, batch=checkpoint.batch)
