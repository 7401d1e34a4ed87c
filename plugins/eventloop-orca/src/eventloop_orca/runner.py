"""The runner that callbacks see: eventloop's State under the names of Orca's document."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from eventloop import PluginError, State, Time
from eventloop.toolbox import inputs_of, is_pair, targets_of


class _OfIteration:
    """An attribute of the current iteration, which doesn't exist before it is assigned.

    Args:
        key: key under which the value is stored; two attributes may share a key.
    """

    def __init__(self, key: str) -> None:
        self._key = key

    def __get__(self, runner: Runner | None, kind: type) -> Any:
        if runner is None:
            return self
        try:
            return runner._iteration[self._key]
        except KeyError:
            raise AttributeError(
                f"runner.{self._key} isn't there now: it is from where it is assigned to the end "
                "of its iteration"
            ) from None

    def __set__(self, runner: Runner, value: Any) -> None:
        runner._iteration[self._key] = value

    def __delete__(self, runner: Runner) -> None:
        self.__get__(runner, type(runner))
        del runner._iteration[self._key]


class Runner:
    """The object passed to callbacks; callbacks may also assign other attributes.

    Attributes:
        epochs: number of finished epochs; an epoch is finished after its validation.
        epoch: number of the current epoch, from 1; of the last epoch after the run.
        batch_idx: position of the batch in its epoch, from 0.
        output, outputs: the model's output, under either name.
        loss: a tensor of shape ().
        target: the target of the default forward pass.
    """

    batch_idx = _OfIteration("batch_idx")
    output = _OfIteration("output")
    outputs = _OfIteration("output")
    loss = _OfIteration("loss")
    target = _OfIteration("target")

    def __init__(self, state: State, items: dict[str, Any]) -> None:
        self._state = state
        self._items = items
        self._iteration: dict[str, Any] = {}
        self._is_predicting = False
        self._is_stopped = False
        self._is_before_run = False
        self.epochs = self.epoch = state.clock.epoch

    def begin_run(self) -> None:
        """Allows changes of `num_epochs`, and clears an earlier stop."""
        self._is_stopped = False
        self._is_before_run = True
        self.end_iteration()

    def end_begin_run(self) -> None:
        """Applies `num_epochs`, which can't change any more.

        Raises:
            PluginError: the ranks disagree.
        """
        self._is_before_run = False
        chosen = self._state.all_gather(str(self._state.until))
        if len(set(chosen)) > 1:
            raise PluginError(
                f"before_run left another end of the run on each rank: {', '.join(chosen)}",
                fix="set runner.num_epochs to the same number on all ranks",
            )

    def begin_iteration(self, batch_idx: int, *, predicting: bool = False) -> None:
        """Begins an iteration, of which only the batch is set."""
        self._iteration = {"batch_idx": batch_idx}
        self._is_predicting = predicting

    def end_iteration(self) -> None:
        """Clears the attributes of the iteration."""
        self._iteration = {}
        self._is_predicting = False

    @property
    def num_epochs(self) -> int | None:
        """The number of epochs of the run, from its start; None if its duration isn't in epochs."""
        until = self._state.until
        length = self._state.num_batches
        if until.unit == "ep":
            return int(until.value)
        return math.ceil(until.value / length) if until.unit == "ba" and length else None

    @num_epochs.setter
    def num_epochs(self, num_epochs: int) -> None:
        if not self._is_before_run:
            raise PluginError(
                "runner.num_epochs was assigned outside of before_run",
                fix="assign it there; set runner.stop to end the run at any other point",
            )
        if not isinstance(num_epochs, int) or num_epochs < 1:
            raise PluginError(
                f"runner.num_epochs={num_epochs!r} is not a number of epochs",
                fix="assign an int of 1 or more; it counts from the start of the run",
            )
        self._state.until = Time(num_epochs, "ep")

    @property
    def stop(self) -> bool:
        """Whether the run ends after this iteration or epoch."""
        return self._is_stopped or self._state.stop_reason is not None

    @stop.setter
    def stop(self, stop: bool) -> None:
        if not stop and self.stop:
            raise PluginError(
                "runner.stop was set to False, but the run is being stopped already",
                fix="assign only True",
            )
        if stop and not self._is_stopped:
            self._is_stopped = True
            self._state.request_stop("an Orca callback set runner.stop")

    @property
    def global_step(self) -> int:
        """The number of finished batches."""
        return self._state.clock.batch

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._state.rank

    @property
    def model(self) -> nn.Module:
        """The model to call for a forward pass, possibly wrapped."""
        return self._state.active_model

    @property
    def optimizer(self) -> Any:
        """The optimizer; a list if there are several."""
        return _only(list(self._state.optimizers.values()))

    @property
    def scheduler(self) -> Any:
        """The scheduler; a list if there are several, None if there is none."""
        pairs = [pair for pairs in self._state.schedulers.values() for pair in pairs]
        return _only([scheduler for _, scheduler in pairs])

    lr_scheduler = scheduler

    @property
    def criterion(self) -> Any:
        """The task's loss, a function of outputs and targets; None if it has none."""
        return self._state.criterion

    @property
    def train_loader(self) -> Any:
        """The data loader of training."""
        return self._state.train_dataloader

    @property
    def val_loader(self) -> Any:
        """The data loader of the current validation, or else of the first; None without any."""
        loaders = self._state.eval_dataloaders
        name = self._state.eval_name
        return next(iter(loaders.values()), None) if name is None else loaders[name]

    @property
    def batch(self) -> tuple[Any, ...] | Any:
        """The inputs and the target as a tuple; in a prediction, only the inputs."""
        state = self._state
        batch = state.batch if state.microbatch is None else state.microbatch
        if batch is None:
            raise AttributeError("runner.batch isn't there now: no iteration is under way")
        if self._is_predicting:
            inputs = inputs_of(batch)
            return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
        if is_pair(batch) and isinstance(batch[0], (tuple, list)):
            return (*batch[0], targets_of(batch))
        return batch

    @batch.setter
    def batch(self, batch: Any) -> None:
        state = self._state
        old = state.batch if state.microbatch is None else state.microbatch
        if self._is_predicting:
            state.inputs = batch if isinstance(inputs_of(old), (tuple, list)) else batch[0]
            return
        if is_pair(old) and isinstance(old[0], (tuple, list)):
            batch = tuple(batch[:-1]), batch[-1]
        if state.microbatch is None:
            state.batch = batch
        else:
            state.microbatch = batch

    def put(self, key: str, value: Any) -> None:
        """Stores a value that all callbacks can read.

        Raises:
            KeyError: the key exists; `update` changes its value.
        """
        if key in self._items:
            raise KeyError(f"{key!r} is there already; change it with runner.update")
        self._items[key] = value

    def get(self, key: str) -> Any:
        """Returns the value of a key.

        Raises:
            KeyError: the key doesn't exist.
        """
        return self._items[self._known(key)]

    def update(self, key: str, value: Any) -> None:
        """Replaces the value of a key.

        Raises:
            KeyError: the key doesn't exist.
        """
        self._items[self._known(key)] = value

    def remove(self, key: str) -> None:
        """Removes a key and its value.

        Raises:
            KeyError: the key doesn't exist.
        """
        del self._items[self._known(key)]

    def _known(self, key: str) -> str:
        if key not in self._items:
            raise KeyError(f"no item is named {key!r}; there are {sorted(self._items)}")
        return key


def _only(values: Sequence[Any]) -> Any:
    """Returns a single value itself, several values as a list, and None for no value."""
    if len(values) > 1:
        return list(values)
    return values[0] if values else None
