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
    """A file that was written amid a batch.

    Args:
        content: what Lightning has written, in containers of its own, with the tensors of the run.
        versions: how often each of these tensors had been changed then.
    """

    path: Any
    options: Any
    content: dict[str, Any]
    versions: list[int]

    @property
    def has_changed(self) -> bool:
        """Whether a tensor was changed since."""
        return self.versions != _versions(self.content)


class ResumableFiles:
    """Completes the files that Lightning's trainer writes.

    A file is there when Lightning has asked for it, amid the hooks of a batch; it is written once
    more, with the rest, when the batch is done. After the fit files are complete at once.

    Args:
        trainer: Lightning's.
        keeping: takes it apart.

    Attributes:
        lend: returns the weights that evaluation sees, averages, which are then those of all files;
            None where these are the module's own.
    """

    def __init__(self, trainer: Any, keeping: Keeping) -> None:
        self._trainer = trainer
        self._keeping = keeping
        self._waiting: dict[str, _Written] = {}
        self._rest: dict[str, Any] | None = None
        self.lend: Callable[[], dict[str, Tensor]] | None = None
        self._validated: tuple[int, dict[str, Tensor]] | None = None

    def keep_validated(self, state: State) -> None:
        """Keeps the weights that a validation has seen: the score is theirs.

        A plugin may add to its mean after that, as swa does.
        """
        if self.lend is not None:
            weights = {name: one.clone() for name, one in state.model.state_dict().items()}
            self._validated = state.clock.batch, weights

    def averages(self, state: State) -> dict[str, Tensor]:
        """Returns the weights that files have now: those of a validation after this batch, if any."""
        assert self.lend is not None
        saved = self._validated
        return saved[1] if saved is not None and saved[0] == state.clock.batch else self.lend()

    def take(self, content: dict[str, Any], path: Any, options: Any) -> None:
        """Called before a file is written; adds the rest, if the fit is over."""
        is_whole = "optimizer_states" in content  # from weights alone no run goes on
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
        """Writes the files of this batch once more, with where the run is now."""
        if not self._waiting:
            return
        waiting = [*self._waiting.values()]
        self._waiting = {}
        rest = self._captured(state, waiting[-1].content)
        weights = {} if self.lend is None else {"state_dict": self.averages(state)}
        if state.rank == 0:
            for one in waiting:
                is_whole = "optimizer_states" in one.content
                self._complete(one, weights | ({KEY: rest} if is_whole else {}))

    def finish(self, state: State, *, has_failed: bool = False) -> None:
        """Keeps where the run is, for files that are written from now on.

        Args:
            has_failed: whether that is amid a batch: what is counted of it is taken back.
        """
        rest = self._captured(state, {})
        parts = rest["parts"]
        if state.rank == 0:
            trained = parts.pop("model")
            if self.lend is not None and not has_failed:  # the module gets others now
                parts["model"] = {name: one.cpu().clone() for name, one in trained.items()}
            rest["optimizers"] = [*parts.pop("optimizers")]
            if has_failed:
                _take_back(parts["plugins"]["task"]["state"]["loops"]["fit_loop"])
                # The batch that failed is taken again.
                parts["rank0"]["feed"]["num_taken"] = state.clock.batch_in_epoch
        self._rest = rest

    def _captured(self, state: State, content: Mapping[str, Any]) -> dict[str, Any]:
        self._keeping.in_file = content
        batch = state.batch
        state.batch = None  # of one that has failed, nothing is in a file
        try:
            captured = state.capture()
        finally:
            self._keeping.in_file = None
            state.batch = batch
        rest = {"batch": state.clock.batch, "version": eventloop.__version__}
        return _copied({**rest, "facts": captured.facts, "parts": captured.parts})

    def _complete(self, one: _Written, more: Mapping[str, Any]) -> None:
        files = self._trainer.strategy.checkpoint_io
        is_local = "://" not in str(one.path) and not isinstance(files, _WrappingCheckpointIO)
        if is_local and not Path(one.path).exists():
            return  # moved away, or removed
        content = one.content
        if one.has_changed:
            content = files.load_checkpoint(one.path, weights_only=False)
        files.save_checkpoint({**content, **more}, one.path, storage_options=one.options)


def checkpoint_in(trainer: Any, path: Any, weights_only: bool | None) -> Checkpoint:
    """Reads eventloop's checkpoint from a checkpoint file of Lightning's.

    Raises:
        SettingError: it was written by another trainer, or has weights alone.
    """
    rest = trainer.strategy.load_checkpoint(path, weights_only=weights_only).get(KEY)
    if rest is None:
        raise SettingError(
            f"{str(path)!r} was not written by this Trainer, or has weights alone, so that a run can't "
            "go on from it exactly",
            fix="load the weights, `Model.load_from_checkpoint(path)`, and begin a run with them",
        )
    names = tuple(rest["parts"])
    where = Path(str(path))
    return Checkpoint(where, rest["batch"], rest["facts"], rest["parts"], rest["version"], names)


def _with_rest(content: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a file lacks, with its own weights and what hooks have put into it."""
    rest = {key: one for key, one in saved.items() if key != "optimizers"}
    parts = {"model": content["state_dict"], **rest["parts"]}
    if "plugins" in parts:  # of rank 0, which writes
        task = parts["plugins"]["task"]
        hidden = task["state"]["hidden_optimizers"]
        states = content["optimizer_states"]
        shown = [one for idx, one in enumerate(states) if str(idx) not in hidden]
        parts["optimizers"] = dict(zip(saved["optimizers"], shown, strict=True))
        now = {key: one for key, one in content.items() if key not in (*ELSEWHERE, "loops")}
        now["hidden_optimizers"] = {idx: states[int(idx)] for idx in hidden}
        task = {**task, "state": {**task["state"], **now}}
        parts["plugins"] = {**parts["plugins"], "task": task}
    return {**rest, "parts": parts}


def _take_back(loops: Mapping[str, Any]) -> None:
    """Resets batch and step counters to the last one processed."""
    for name, one in loops.items():
        if name.startswith("epoch_loop.") and isinstance(one, dict):
            _take_back_counts(one)


def _take_back_counts(nest: dict[str, Any]) -> None:
    for one in nest.values():
        if isinstance(one, dict):
            _take_back_counts(one)
    if "completed" in nest:
        number = nest.get("processed", nest["completed"])
        nest.update({name: number for name in _COUNTED if name in nest})


def _copied(nest: Any) -> Any:
    """Returns a nest in new containers; tensors and other objects are the same."""
    if isinstance(nest, Mapping):
        copied = {key: _copied(one) for key, one in nest.items()}
        is_plain = type(nest) is dict or not isinstance(nest, dict)
        return copied if is_plain else _like(nest, copied)
    if type(nest) in (list, tuple):
        return type(nest)(map(_copied, nest))
    return nest


def _like(nest: Any, copied: dict[Any, Any]) -> Any:
    """Returns a copy of a dict subclass, such as OrderedDict, with these values."""
    made = nest.copy()
    made.update(copied)
    return made


def _versions(nest: Any) -> list[int]:
    return [one._version for one in _tensors(nest) if not one.is_inference()]


def _tensors(nest: Any) -> Iterator[Tensor]:
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, Mapping | list | tuple):
        for one in nest.values() if isinstance(nest, Mapping) else nest:
            yield from _tensors(one)
