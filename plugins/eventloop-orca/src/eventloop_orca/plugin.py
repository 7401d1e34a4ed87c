"""The plugin: calls each point of an Orca run from a hook of eventloop."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from eventloop import CheckpointError, PluginError, State, hookimpl
from eventloop.toolbox import flatten, switch_off
from eventloop_orca.loading import callback_of
from eventloop_orca.owned import parts_of_main
from eventloop_orca.points import Points
from eventloop_orca.runner import Runner
from eventloop_orca.suitable import problems_with_main


class Orca:
    """Runs callbacks that were written for BigDL Orca's runner, unchanged.

    A callback is a class with methods such as `before_run` or `after_train_iter`, or `on_epoch_end` of the
    second naming, each taking the runner. At most a single callback is a main callback, which has methods
    such as `on_iter_forward`, `on_iter_backward` or `on_lr_adjust` and makes the step; eventloop does
    the parts for which it has no method.

    Args:
        callbacks: paths `package.module:Class` or `./file.py:Class`, in the order in which they are
            called; in Python instances, too. A main callback is called first.

    Raises:
        TypeError: `callbacks` is not a list.
        ValueError: `callbacks` is empty.
        PluginError: a callback can't be found or built, has no method of a point, or there are two main callbacks.
    """

    # A callback runs on every rank, and may store different values on each.
    state_per_rank = True

    needs_eval_data = True

    def __init__(self, *, callbacks: list[Any] | str) -> None:
        listed = [callbacks] if isinstance(callbacks, str) else callbacks
        if not isinstance(listed, (list, tuple)):
            raise TypeError(f"callbacks={callbacks!r} is not a list of callbacks or their paths")
        if not listed:
            raise ValueError(
                "callbacks=[] has none; name one, or switch orca off with " + switch_off("orca")
            )
        self.callbacks = callbacks
        self._points = Points([callback_of(specification) for specification in listed])
        owned = parts_of_main(self._points, lambda: self._runner)
        for component in owned:
            for name in component.actions:
                setattr(self, name, getattr(component, name))
        actions = ", ".join(name for component in owned for name in component.actions)
        main = type(self._points.main).__name__
        self._note = f"the main callback {main} owns {actions}" if owned else ""
        self.conflicts = tuple(name for component in owned for name in component.conflicts)
        self._items: dict[str, Any] = {}
        self._runner: Any = None
        self._eval_idx = 0

    @hookimpl
    def header_note(self) -> str:
        """Returns the actions that the main callback owns."""
        return self._note

    @hookimpl
    def after_load(self, state: State) -> None:
        """Creates the runner; refuses runs that the main callback can't handle."""
        self._runner = Runner(state, self._items)
        if self._points.main is not None:
            problems = list(problems_with_main(state, self._points))
            if problems:
                name = type(self._points.main).__name__
                raise PluginError(
                    f"the main callback {name} can't train this run: {'; '.join(problems)}",
                    fix="change that, or leave the callback out",
                )

    @hookimpl
    def fit_start(self, state: State) -> None:
        """The point `before_run`."""
        self._runner.begin_run()
        self._tell("before_run")
        self._runner.end_begin_run()

    @hookimpl
    def epoch_start(self, state: State) -> None:
        """The point `before_train_epoch`, also called when an epoch is resumed."""
        self._runner.epochs = state.clock.epoch
        self._runner.epoch = state.clock.epoch + 1
        self._tell("before_train_epoch")

    @hookimpl(wrapper=True)
    def train_batch(self, state: State) -> Generator[None, Any, Any]:
        """The points `before_train_iter` and `after_train_iter`."""
        runner = self._runner
        runner.begin_iteration(state.clock.batch_in_epoch)
        self._tell("before_train_iter")
        stepped = yield
        if state.loss is not None:
            runner.loss = state.loss
        self._tell("after_train_iter")
        runner.end_iteration()
        return stepped

    @hookimpl
    def before_backward(self, state: State) -> None:
        """Shows the callbacks the outputs and the loss, whichever plugin computed them."""
        self._runner.output = state.outputs
        self._runner.loss = state.loss

    @hookimpl
    def epoch_checkpoint(self, state: State) -> None:
        """The point `after_train_epoch`, when the epoch's validation is done."""
        self._runner.epochs = state.clock.epoch
        self._tell("after_train_epoch")

    @hookimpl
    def fit_end(self, state: State) -> None:
        """The point `after_run`."""
        self._tell("after_run")

    @hookimpl
    def eval_start(self, state: State) -> None:
        """The point `before_val_epoch`, for each eval data loader."""
        self._eval_idx = 0
        self._tell("before_val_epoch")

    @hookimpl
    def eval_batch_start(self, state: State) -> None:
        """The point `before_val_iter`."""
        self._runner.begin_iteration(self._eval_idx)
        self._tell("before_val_iter")

    @hookimpl
    def eval_batch_end(self, state: State) -> None:
        """The point `after_val_iter`."""
        self._runner.output = state.outputs
        self._tell("after_val_iter")
        self._runner.end_iteration()
        self._eval_idx += 1

    @hookimpl
    def eval_end(self, state: State) -> None:
        """The point `after_val_epoch`."""
        self._tell("after_val_epoch")

    @hookimpl
    def predict_start(self, state: State) -> None:
        """The point `before_pred_epoch`."""
        self._eval_idx = 0
        self._tell("before_pred_epoch")

    @hookimpl
    def predict_batch_start(self, state: State) -> None:
        """The point `before_pred_iter`."""
        self._runner.begin_iteration(self._eval_idx, predicting=True)
        self._tell("before_pred_iter")

    @hookimpl
    def predict_batch_end(self, state: State) -> None:
        """The point `after_pred_iter`; returns the output as the callbacks leave it."""
        self._runner.output = state.outputs
        self._tell("after_pred_iter")
        state.outputs = self._runner.output
        self._runner.end_iteration()
        self._eval_idx += 1

    @hookimpl
    def predict_end(self, state: State) -> None:
        """The point `after_pred_epoch`."""
        self._tell("after_pred_epoch")

    def state_dict(self) -> dict[str, Any]:
        """Returns the items that callbacks have put, and the states of callbacks with a `state_dict`."""
        return {
            "kept": {key: value for key, value in self._items.items() if _can_be_saved(key, value)},
            "callbacks": {str(idx): callback.state_dict() for idx, callback in self._with_state()},
        }

    def load_state_dict(self, state: Mapping[str, Any], version: str) -> None:
        """Restores the items and the callbacks' states."""
        self._items.clear()
        self._items.update(state["kept"])
        for idx, callback in self._with_state():
            if str(idx) in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][str(idx)])

    def _tell(self, point: str) -> None:
        self._points.call(point, self._runner)

    def _with_state(self) -> Iterator[tuple[int, Any]]:
        for idx, callback in enumerate(self._points.callbacks):
            methods = (getattr(callback, name, None) for name in ("state_dict", "load_state_dict"))
            if all(map(callable, methods)):
                yield idx, callback


def _can_be_saved(key: str, value: Any) -> bool:
    try:
        flatten({key: value}, "runner.put")
    except CheckpointError as error:
        warnings.warn(
            f"what a callback has put as {key!r} isn't saved with the run: {error.args[0]}",
            stacklevel=2,
        )
        return False
    return True
