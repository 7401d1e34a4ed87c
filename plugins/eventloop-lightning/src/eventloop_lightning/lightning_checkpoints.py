"""Lightning's checkpoint files, with an entry from which a run can be resumed exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO  # private (lightning 2.6.6)
from torch import Tensor

import eventloop
from eventloop import SettingError, State
from eventloop.toolbox import Checkpoint
from eventloop_lightning.checkpoint_state import ELSEWHERE, Keeping

KEY = "eventloop"
_COUNTED = ("ready", "started", "processed", "completed")


@dataclass(frozen=True)
class _Written:
    """A file that was written in the middle of a batch.

    Args:
        content: the content that Lightning has written, in new containers, with the run's tensors.
        versions: version counters of these tensors at that time.
    """

    path: Any
    options: Any
    content: dict[str, Any]
    versions: list[int]

    @property
    def has_changed(self) -> bool:
        """Whether a tensor has changed since."""
        return self.versions != _versions(self.content)


class ResumableFiles:
    """Completes the files that Lightning's trainer writes.

    Lightning requests a file amid the hooks of a batch, and it is written then. When the batch is done,
    it is rewritten with the state that a run needs to resume. After the fit, files are complete at once.

    Args:
        trainer: Lightning's trainer.
        keeping: saves the trainer's state.

    Attributes:
        lend: returns the averaged weights that evaluation uses, which all files then have; None if
            evaluation uses the module's own weights.
    """

    def __init__(self, trainer: Any, keeping: Keeping) -> None:
        self._trainer = trainer
        self._keeping = keeping
        self._waiting: dict[str, _Written] = {}
        self._rest: dict[str, Any] | None = None
        self.lend: Callable[[], dict[str, Tensor]] | None = None
        self._validated: tuple[int, dict[str, Tensor]] | None = None

    def keep_validated(self, state: State) -> None:
        """Stores the weights that were validated: the score belongs to them.

        A plugin such as swa may update its average afterwards.
        """
        if self.lend is not None:
            weights = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
            self._validated = state.clock.batch, weights

    def averages(self, state: State) -> dict[str, Tensor]:
        """Returns the weights for files: the validated weights, if this batch was validated."""
        assert self.lend is not None
        saved = self._validated
        return saved[1] if saved is not None and saved[0] == state.clock.batch else self.lend()

    def take(self, content: dict[str, Any], path: Any, options: Any) -> None:
        """Called before a file is written; adds the rest, if the fit is over."""
        is_whole = "optimizer_states" in content  # a file with only weights can't resume a run
        if self._rest is not None and is_whole:
            content[KEY] = _with_rest(content, self._rest)
        if self._rest is not None or (not is_whole and self.lend is None):
            return
        if "://" not in str(path):
            self._keeping.files.add_checkpoint(Path(path))
        self._waiting[str(path)] = _Written(path, options, _copied(content), _versions(content))

    def drop(self, path: Any) -> None:
        """Called when a file is removed."""
        self._waiting.pop(str(path), None)

    def complete(self, state: State) -> None:
        """Rewrites the files of this batch, with the state of the run."""
        if not self._waiting:
            return
        waiting = [*self._waiting.values()]
        self._waiting = {}
        run_state = self._captured(state, waiting[-1].content)
        weights = {} if self.lend is None else {"state_dict": self.averages(state)}
        if state.rank == 0:
            for written in waiting:
                is_whole = "optimizer_states" in written.content
                self._complete(written, weights | ({KEY: run_state} if is_whole else {}))

    def finish(self, state: State, *, has_failed: bool = False) -> None:
        """Stores the state of the run, for files that are written later.

        Args:
            has_failed: whether a batch failed: its counts are reverted.
        """
        run_state = self._captured(state, {})
        checkpoint_parts = run_state["parts"]
        if state.rank == 0:
            trained = checkpoint_parts.pop("model")
            if self.lend is not None and not has_failed:  # the module gets the averages now
                checkpoint_parts["model"] = {
                    name: tensor.cpu().clone() for name, tensor in trained.items()
                }
            run_state["optimizers"] = [*checkpoint_parts.pop("optimizers")]
            if has_failed:
                _take_back(checkpoint_parts["plugins"]["task"]["state"]["loops"]["fit_loop"])
                # The failed batch is repeated.
                checkpoint_parts["rank0"]["feed"]["num_taken"] = state.clock.batch_in_epoch
        self._rest = run_state

    def _captured(self, state: State, content: Mapping[str, Any]) -> dict[str, Any]:
        self._keeping.in_file = content
        batch = state.batch
        state.batch = None  # a failed batch must not be in a file
        try:
            captured = state.capture()
        finally:
            self._keeping.in_file = None
            state.batch = batch
        facts_of_file = {"batch": state.clock.batch, "version": eventloop.__version__}
        return _copied({**facts_of_file, "facts": captured.facts, "parts": captured.parts})

    def _complete(self, written: _Written, additions: Mapping[str, Any]) -> None:
        files = self._trainer.strategy.checkpoint_io
        is_local = "://" not in str(written.path) and not isinstance(files, _WrappingCheckpointIO)
        if is_local and not Path(written.path).exists():
            return  # moved away, or removed
        content = written.content
        if written.has_changed:
            content = files.load_checkpoint(written.path, weights_only=False)
        files.save_checkpoint(
            {**content, **additions}, written.path, storage_options=written.options
        )


def checkpoint_in(trainer: Any, path: Any, weights_only: bool | None) -> Checkpoint:
    """Reads eventloop's checkpoint from a checkpoint file of Lightning's.

    Raises:
        SettingError: it was written by another trainer, or has only weights.
    """
    run_state = trainer.strategy.load_checkpoint(path, weights_only=weights_only).get(KEY)
    if run_state is None:
        raise SettingError(
            f"{str(path)!r} was not written by this Trainer, or has weights alone, so that a run can't "
            "go on from it exactly",
            fix="load the weights, `Model.load_from_checkpoint(path)`, and begin a run with them",
        )
    names = tuple(run_state["parts"])
    checkpoint_path = Path(str(path))
    return Checkpoint(
        checkpoint_path,
        run_state["batch"],
        run_state["facts"],
        run_state["parts"],
        run_state["version"],
        names,
    )


def _with_rest(content: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the run's state for a file, with the file's own weights and the entries of its hooks."""
    run_state = {key: value for key, value in saved.items() if key != "optimizers"}
    checkpoint_parts = {"model": content["state_dict"], **run_state["parts"]}
    if "plugins" in checkpoint_parts:  # on rank 0, which writes
        task = checkpoint_parts["plugins"]["task"]
        hidden = task["state"]["hidden_optimizers"]
        states = content["optimizer_states"]
        shown = [
            optimizer_state for idx, optimizer_state in enumerate(states) if str(idx) not in hidden
        ]
        checkpoint_parts["optimizers"] = dict(zip(saved["optimizers"], shown, strict=True))
        task_state = {
            key: value for key, value in content.items() if key not in (*ELSEWHERE, "loops")
        }
        task_state["hidden_optimizers"] = {idx: states[int(idx)] for idx in hidden}
        task = {**task, "state": {**task["state"], **task_state}}
        checkpoint_parts["plugins"] = {**checkpoint_parts["plugins"], "task": task}
    return {**run_state, "parts": checkpoint_parts}


def _take_back(loops: Mapping[str, Any]) -> None:
    """Resets batch and step counters to the last one processed."""
    for name, value in loops.items():
        if name.startswith("epoch_loop.") and isinstance(value, dict):
            _take_back_counts(value)


def _take_back_counts(nest: dict[str, Any]) -> None:
    for value in nest.values():
        if isinstance(value, dict):
            _take_back_counts(value)
    if "completed" in nest:
        number = nest.get("processed", nest["completed"])
        nest.update({name: number for name in _COUNTED if name in nest})


def _copied(nest: Any) -> Any:
    """Returns a nest in new containers; tensors and other objects are the same."""
    if isinstance(nest, Mapping):
        copied = {key: _copied(value) for key, value in nest.items()}
        is_plain = type(nest) is dict or not isinstance(nest, dict)
        return copied if is_plain else _like(nest, copied)
    if type(nest) in (list, tuple):
        return type(nest)(map(_copied, nest))
    return nest


def _like(nest: Any, copied: dict[Any, Any]) -> Any:
    """Returns a copy of a dict subclass, such as OrderedDict, with these values."""
    new_nest = nest.copy()
    new_nest.update(copied)
    return new_nest


def _versions(nest: Any) -> list[int]:
    return [tensor._version for tensor in _tensors(nest) if not tensor.is_inference()]


def _tensors(nest: Any) -> Iterator[Tensor]:
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, Mapping | list | tuple):
        for value in nest.values() if isinstance(nest, Mapping) else nest:
            yield from _tensors(value)
