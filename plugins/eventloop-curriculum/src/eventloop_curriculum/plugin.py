"""The plugin: which data loader an epoch has."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

from torch.utils.data import DataLoader

from eventloop import Moment, PluginError, SettingError, State, hookimpl
from eventloop.toolbox import describe
from eventloop_curriculum.loaders import remade
from eventloop_curriculum.steps import Steps

_NOTHING_SET = (
    "nothing is set: give --curriculum.batch-size '{\"5ep\": 128}', --curriculum.seq-len, or stages "
    "in Python"
)


class Curriculum:
    """Switches the data loader, the batch size or the sequence length at given times.

    What is given for a time is in force from the first epoch on that begins then or later; before
    that it is the task's. An epoch isn't cut.

    Args:
        batch_size: samples a batch on each rank, by time: {"5ep": 128, "0.8dur": 256}.
        seq_len: how long sequences may be, by time; what is beyond is cut.
        stages: in Python, by time: a data loader, or a function that takes the state and gives one.

    Raises:
        TypeError: an option is not a mapping, or holds something else.
        ValueError: a time is none, or a size isn't positive.
    """

    def __init__(
        self,
        *,
        batch_size: dict[str, int] | None = None,
        seq_len: dict[str, int] | None = None,
        stages: dict[str, Any] | None = None,
    ) -> None:
        for name, sizes in (("batch_size", batch_size), ("seq_len", seq_len)):
            _check(name, sizes, _is_size, "a whole number, 1 or more")
        _check("stages", stages, _is_stage, "a data loader or a function that gives one")
        self._steps: dict[str, Steps[Any]] = {
            "stages": Steps(stages or {}),
            "batch_size": Steps(batch_size or {}),
            "seq_len": Steps(seq_len or {}),
        }
        self._began: Moment | None = None  # the epoch, whose data loader is in force
        self._is_fitting = False

    @hookimpl
    def unsuitable(self, state: State) -> str | None:
        """Returns why the plugin can't be used: no option schedules a change; None if it can."""
        return None if any(steps.values for steps in self._steps.values()) else _NOTHING_SET

    @hookimpl
    def should_rebuild_dataloader(self, state: State) -> bool:
        """Answers True if a time has come since the last epoch began."""
        now = state.clock.moment()
        return self._began is None or self._reached(self._began, state) != self._reached(now, state)

    @hookimpl
    def fit_start(self) -> None:
        """Notes that data loaders built from now on are those of new epochs."""
        self._is_fitting = True

    @hookimpl
    def epoch_start(self, state: State) -> None:
        """Notes when the epoch began."""
        if not state.resumed:
            self._began = state.clock.moment()

    @hookimpl(conditional=True, specname="build_train_dataloader")
    def stage(self, state: State) -> Any:
        """Returns the stage's data loader; the task's, where none has come."""
        # The clock of a resumed run may be past the beginning of its epoch.
        if self._is_fitting or self._began is None:
            self._began = state.clock.moment()
        stage = self._current("stages", state)
        return stage(state) if callable(stage) and not isinstance(stage, Iterable) else stage

    @hookimpl(wrapper=True)
    def build_train_dataloader(self, state: State) -> Generator[None, Any, Any]:
        """Makes the batches larger or shorter, whichever plugin built the data loader."""
        dataloader = yield
        sizes = {name: self._current(name, state) for name in ("batch_size", "seq_len")}
        if set(sizes.values()) == {None}:
            return dataloader
        try:
            if not isinstance(dataloader, DataLoader):
                raise TypeError(f"it is {describe(dataloader)}")
            return remade(dataloader, **sizes)
        except (TypeError, ValueError) as error:
            raise PluginError(
                f"curriculum can't change the batches of the train data loader: {error}",
                fix="give a DataLoader(dataset, batch_size=...), or data loaders by time: "
                "Curriculum(stages={...})",
            ) from error

    @hookimpl
    def training_end(self, state: State) -> None:
        """Warns if a time came too late for an epoch."""
        if state.rank > 0 or state.stop_reason is not None:
            return
        assert self._began is not None
        if self._reached(self._began, state) != self._reached(state.clock.moment(), state):
            warnings.warn(
                "curriculum: the run has ended before an epoch began with what was given for its "
                "last time; give an earlier one, or shorter epochs",
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns when the epoch began, which is valid whatever times the run is resumed with."""
        return {"began": self._began and self._began._asdict()}

    def load_state_dict(self, state: Mapping[str, Any], version: str) -> None:
        """Restores when the epoch began; its data loader is chosen by the current times."""
        self._began = state["began"] and Moment(**state["began"])

    def _reached(self, at: Moment, state: State) -> dict[str, int]:
        try:
            return {kind: steps.reached(at, state.duration) for kind, steps in self._steps.items()}
        except ValueError as error:
            raise SettingError(
                f"curriculum: {error}", fix='write its times in epochs or batches: {"5ep": 128}'
            ) from None

    def _current(self, kind: str, state: State) -> Any:
        assert self._began is not None
        num = self._reached(self._began, state)[kind]
        return self._steps[kind].values[num - 1] if num else None


def _check(name: str, given: object, holds: Callable[[object], bool], what: str) -> None:
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise TypeError(f'{name}={given!r} is not a mapping by time, such as {{"5ep": ...}}')
    for time, value in given.items():
        if not holds(value):
            raise ValueError(f"{name}[{str(time)!r}] is {value!r}, not {what}")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_stage(value: object) -> bool:
    return callable(value) or (isinstance(value, Iterable) and not isinstance(value, str))
