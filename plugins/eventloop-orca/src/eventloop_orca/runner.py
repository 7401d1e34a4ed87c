"""The runner that callbacks see: eventloop's State under the names of Orca's document."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from eventloop import PluginError, State, Time
from eventloop.toolbox import inputs_of, is_pair, targets_of


class _OfIteration:
    """An attribute of the iteration under way, which isn't there before it was assigned.

    Args:
        key: what it is kept under; two names may be one.
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
    """The object passed to callbacks; attributes that it doesn't define may be assigned, too.

    Attributes:
        epochs: how many epochs are done; the one under way counts after its validation.
        epoch: the number of the epoch under way, from 1; of the latest one after the run.
        batch_idx: the number of the batch within its epoch, from 0.
        output, outputs: what the model gave, by either name.
        loss: a tensor of shape ().
        target: what the default forward pass took for it.
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
        """Lets `num_epochs` be changed, and forgets an earlier stop."""
        self._is_stopped = False
        self._is_before_run = True
        self.end_iteration()

    def end_begin_run(self) -> None:
        """Settles `num_epochs`.

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
        """Begins an iteration, of which nothing but the batch is known."""
        self._iteration = {"batch_idx": batch_idx}
        self._is_predicting = predicting

    def end_iteration(self) -> None:
        """Takes away what belonged to the iteration."""
        self._iteration = {}
        self._is_predicting = False

    @property
    def num_epochs(self) -> int | None:
        """How many epochs the run has, from its start; None where its length isn't known in them."""
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
                fix="assign True alone",
            )
        if stop and not self._is_stopped:
            self._is_stopped = True
            self._state.request_stop("an Orca callback set runner.stop")

    @property
    def global_step(self) -> int:
        """How many batches are done."""
        return self._state.clock.batch

    @property
    def rank(self) -> int:
        """This process's number."""
        return self._state.rank

    @property
    def model(self) -> nn.Module:
        """What is called for a forward pass."""
        return self._state.active_model

    @property
    def optimizer(self) -> Any:
        """The optimizer; a list where there are several."""
        return _only(list(self._state.optimizers.values()))

    @property
    def scheduler(self) -> Any:
        """The scheduler; a list where there are several, None where there is none."""
        pairs = [one for every in self._state.schedulers.values() for one in every]
        return _only([scheduler for _, scheduler in pairs])

    lr_scheduler = scheduler

    @property
    def criterion(self) -> Any:
        """The task's loss, a function of outputs and targets; None where it has none."""
        return self._state.criterion

    @property
    def train_loader(self) -> Any:
        """The data loader of training."""
        return self._state.train_dataloader

    @property
    def val_loader(self) -> Any:
        """The data loader of the validation under way, else of the first; None without any."""
        loaders = self._state.eval_dataloaders
        name = self._state.eval_name
        return next(iter(loaders.values()), None) if name is None else loaders[name]

    @property
    def batch(self) -> tuple[Any, ...] | Any:
        """Inputs and target, several inputs one after the other; inputs alone in a prediction."""
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
        """Keeps a value that all callbacks can get.

        Raises:
            KeyError: the key is there; `update` changes its value.
        """
        if key in self._items:
            raise KeyError(f"{key!r} is there already; change it with runner.update")
        self._items[key] = value

    def get(self, key: str) -> Any:
        """Returns the value of a key.

        Raises:
            KeyError: it isn't there.
        """
        return self._items[self._known(key)]

    def update(self, key: str, value: Any) -> None:
        """Replaces the value of a key.

        Raises:
            KeyError: it isn't there.
        """
        self._items[self._known(key)] = value

    def remove(self, key: str) -> None:
        """Takes a key and its value away.

        Raises:
            KeyError: it isn't there.
        """
        del self._items[self._known(key)]

    def _known(self, key: str) -> str:
        if key not in self._items:
            raise KeyError(f"no item is named {key!r}; there are {sorted(self._items)}")
        return key


def _only(several: Sequence[Any]) -> Any:
    """Returns the only one; all of several; None of none."""
    if len(several) > 1:
        return list(several)
    return several[0] if several else None
