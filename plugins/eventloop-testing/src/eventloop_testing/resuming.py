"""Checks that a run stopped or killed, and resumed in another process, equals an uninterrupted run."""

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
_DURATION = "3ep"  # its middle is in the middle of the second epoch
_STATUS = 9
_STOP_ON_DEVICE = 2  # in the first epoch, which may have only three batches


def is_resumed(case: Case) -> Iterator[str]:
    """Compares uninterrupted runs with a run that was stopped in the middle of an epoch and resumed.

    The plugin's state is saved and restored by that. Values that differ between two uninterrupted runs,
    such as durations, aren't compared.
    """
    try:
        uninterrupted = _in_one_go(case)
        repeated = _in_one_go(case)
    except CheckpointError as error:  # on all ranks
        yield text_of(error).partition("\n")[0]
        return
    batch = uninterrupted.num_batches // 2
    try:
        resumed = _resumed(case, batch)
    except Exception as error:  # noqa: BLE001  a plugin may raise anything
        # Errors of load_state_dict are wrapped into a CheckpointError that names the value.
        cause = error.__cause__ if isinstance(error, CheckpointError) else None
        original_error = cause or error
        yield (
            "a run with it can't be resumed: "
            f"{type(original_error).__name__}: {text_of(original_error)}"
        )
        return
    if resumed.lost:
        yield f"what load_state_dict was given isn't what state_dict gives then: {resumed.lost}"
    problems = list(_differing(uninterrupted, repeated, resumed))
    case.is_resumed = not (problems or resumed.lost)
    # Further runs would need all ranks, and the others may have no problem.
    if problems and uninterrupted.world_size == 1 and not _task_is_resumed(case, batch):
        yield "the task isn't resumed exactly, with it or without; give another one with task="
        return
    for problem in problems:
        yield f"a run that is stopped after batch {batch} and resumed {problem}; {_advice(case)}"


def resume_on(case: Case, device: str) -> None:
    """Stops a run in the middle of an epoch and resumes it on a device; raises the errors of the runs."""
    settings: dict[str, Any] = {
        "folder": case.new_folder(),
        "max_duration": _DURATION,
        "device": device,
        "precision": "fp32",
        "callbacks": (_Saves(_STOP_ON_DEVICE),),
    }
    stop = (Fails(_STOP_ON_DEVICE + 1),)
    with (
        contextlib.suppress(ExpectedError),
        case.trainer(case.build(), algorithms=stop, **settings) as trainer,
    ):
        trainer.fit()
    with (
        warnings.catch_warnings(),
        case.trainer(case.build(), algorithms=(Fails(-1),), **settings) as trainer,
    ):
        # A plugin may have stopped the run before.
        warnings.filterwarnings("ignore", message="nothing to train")
        trainer.fit()


class _Outcome(NamedTuple):
    """The results of a run, on a rank."""

    weights: dict[str, Tensor]
    numbers: Numbers
    state: Any
    num_batches: int
    world_size: int
    lost: str = ""  # the part of its state that a resumed run didn't restore


class _Records:
    """A callback that records numbers and texts by moment and name; later values replace earlier ones."""

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
    """A callback that requests a checkpoint after a given batch."""

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


def _resumed(case: Case, batch: int, *, without_plugin: bool = False) -> _Outcome:
    """Trains until one batch after a checkpoint, then resumes with everything rebuilt.

    Args:
        without_plugin: whether to leave the plugin out.
    """
    folder = case.new_folder()
    records = _Records()
    plugins = () if without_plugin else (case.build(),)
    settings: dict[str, Any] = {"folder": folder, "max_duration": _DURATION}
    settings["callbacks"] = (_Saves(batch), records)
    stop = (Fails(batch + 1),)
    with (
        contextlib.suppress(ExpectedError),
        case.trainer(*plugins, algorithms=stop, **settings) as trainer,
    ):
        trainer.fit()
        # The numbers after the checkpoint have to come from the resumed run.
        records.numbers = {
            moment: value for moment, value in records.numbers.items() if moment[0] <= batch
        }
    plugin = None if without_plugin else case.build()
    plugins = () if without_plugin else (plugin,)
    # A resumed run must have the same algorithms.
    with case.trainer(*plugins, algorithms=(Fails(-1),), **settings) as trainer:
        lost = "" if without_plugin else _lost(case, trainer, plugin, batch)
        return _outcome(case, trainer, plugin, records)._replace(lost=lost)


def _lost(case: Case, trainer: Trainer, plugin: Any, batch: int) -> str:
    """Returns the first difference between the saved state and the state after loading it."""
    if not _is_saved(case, trainer):
        return ""
    saved_parts = read_checkpoint(trainer.state.run_dir / "checkpoints" / name_of(batch)).parts
    if case.record.facts.state_per_rank:
        saved_parts = saved_parts[f"rank{trainer.state.rank}"]
    saved = saved_parts["plugins"][fold(case.record.name)]["state"]
    return _difference(saved, _as_saved(plugin), times=True)


def _outcome(case: Case, trainer: Trainer, plugin: Any, records: _Records) -> _Outcome:
    trainer.fit()
    num_batches = trainer.state.clock.batch
    world_size = trainer.state.world_size
    state = _as_saved(plugin) if plugin is not None and keeps_state(case.record) else None
    state = state if _is_saved(case, trainer) else None
    return _Outcome(weights_of(trainer), records.numbers, state, num_batches, world_size)


def _is_saved(case: Case, trainer: Trainer) -> bool:
    """Whether this rank's state is saved: by default only rank 0's state is."""
    is_of_this_rank = case.record.facts.state_per_rank or not trainer.state.rank
    return keeps_state(case.record) and is_of_this_rank


def _differing(uninterrupted: _Outcome, repeated: _Outcome, resumed: _Outcome) -> Iterator[str]:
    """Yields where the resumed run differs although two uninterrupted runs agree."""
    is_reproducible = equal(uninterrupted.weights, repeated.weights)
    if is_reproducible and not equal(uninterrupted.weights, resumed.weights):
        yield "ends with other weights than one in one go"
    for moment in sorted(uninterrupted.numbers.keys() | resumed.numbers.keys()):
        value = uninterrupted.numbers.get(moment)
        resumed_value = resumed.numbers.get(moment)
        if _difference(value, repeated.numbers.get(moment)):
            continue
        if _difference(value, resumed_value):
            batch, name = moment
            yield (
                f"logs {resumed_value} as {name!r} at batch {batch}, where one in one go logs {value}"
            )
            break
    difference = _difference(uninterrupted.state, resumed.state)
    if difference and not _difference(uninterrupted.state, repeated.state):
        yield f"ends with another state_dict() than one in one go: {difference}"


def _task_is_resumed(case: Case, batch: int) -> bool:
    """Whether a run without the plugin resumes exactly, so that the plugin must be the cause."""
    with case.trainer(max_duration=_DURATION) as trainer:
        trainer.fit()
        weights = weights_of(trainer)
    return equal(weights, _resumed(case, batch, without_plugin=True).weights)


def _advice(case: Case) -> str:
    if not keeps_state(case.record):
        return (
            "what it keeps from batch to batch belongs in state_dict() and "
            "load_state_dict(state, version)"
        )
    fix = "something that it keeps isn't in state_dict(), or doesn't come back"
    if not case.record.facts.state_per_rank:
        fix += "; where each rank keeps something else, write state_per_rank = True"
    return fix


def _as_saved(plugin: Any) -> Any:
    """Returns the state of a plugin as it would be loaded from a checkpoint.

    Raises:
        CheckpointError: it can't be saved.
    """
    tensors, skeleton = flatten(plugin.state_dict(), "state_dict()")
    return restore(skeleton, {name: tensor.clone() for name, tensor in held(tensors).items()})


def _difference(value: Any, other_value: Any, *, times: bool = False) -> str:
    """Returns the first difference between two nests, ignoring durations; "" if there is none."""
    for difference in differences({"state": value}, {"state": other_value}, times=times):
        if difference.of_one_run == "seconds":
            continue
        path = difference.path.removeprefix("state").lstrip("/")
        return f"{path or 'it'} is {difference.second}, not {difference.first}"
    return ""


class Dies:
    """An algorithm that ends its process in the middle of a batch, as a kill does: nothing is closed.

    Args:
        batch: number of batches before; None for never, in the resumed run.
        raises: an exception to raise instead, for a run that closes.
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
        """Ends the process, or the run, after the given batch."""
        if state.clock.batch == self.batch:
            if self.raises is not None:
                raise self.raises
            os._exit(_STATUS)


def fit_and_die(fit: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Calls a function in a fork of this process, which `Dies` has to kill.

    Args:
        args, kwargs: arguments of the function.

    Raises:
        AssertionError: the function returned or raised; its exception is printed.
    """
    child = os.fork()
    if not child:
        torch.set_num_threads(1)  # a fork has none of the threads of the pool
        gc.freeze()  # collecting the parent's garbage may wait for its threads
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
    """Reads the newest checkpoint of an `isolated_trainer`'s run in a folder."""
    return read_checkpoint(max((folder / "run" / "checkpoints").glob("ba*")))


class KilledRuns:
    """Compares runs that are killed and resumed with an uninterrupted run.

    Args:
        fit: trains in a folder with `Dies(batch)` among the algorithms: `fit(folder, batch, *args)`.
        folder: folder of the uninterrupted run, which is trained immediately.
        args: further arguments of `fit`.

    Attributes:
        folder, args: as given.
        whole: the last checkpoint of the uninterrupted run.
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
        """Kills a run at the given batches, resumes it each time, and finishes it without a kill.

        Args:
            folder: folder of that run.
            forget: removes something from the parts of its last checkpoint before the last resume.

        Returns:
            The differences between its last checkpoint and the uninterrupted run's.
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
