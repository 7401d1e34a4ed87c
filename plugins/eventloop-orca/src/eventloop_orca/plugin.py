"""The plugin: at which of eventloop's hooks each point of an Orca run lies."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from eventloop import CheckpointError, PluginError, State, hookimpl
from eventloop.checkpoint.nest import flatten
from eventloop_orca.loading import callback_of
from eventloop_orca.points import Points
from eventloop_orca.runner import Runner
from eventloop_orca.suitable import problems_with_main

# Both need the loss of other targets than the batch's, or of each sample, which a main callback
# that computes its loss itself doesn't give.
_NEED_A_LOSS_OF_THE_TASK = ("mixup", "cutmix", "selective-backprop")
# They would come too late for a step that a main callback has made.
_CHANGE_THE_STEP = ("agc", "sam")


class Orca:
    """Runs callbacks that were written for BigDL Orca's runner, unchanged.

    A callback is a class with methods such as `before_run` or `after_train_iter`, or `on_epoch_end`
    of the second naming, each taking the runner. At most one is a main callback: one with
    `on_iter_forward`, `on_iter_backward`, `on_lr_adjust` or the like makes the step; eventloop does
    what it leaves out.

    Args:
        callbacks: paths `package.module:Class` or `./file.py:Class`, in the order in which they are
            called; in Python instances, too. A main callback is called first.

    Raises:
        TypeError: `callbacks` is no list.
        ValueError: it is empty.
        PluginError: one can't be found or built, has no method of a point, or two are main ones.
    """

    # A callback runs on every rank, and may keep there what it likes.
    state_per_rank = True

    def __init__(self, *, callbacks: list[Any] | str) -> None:
        listed = [callbacks] if isinstance(callbacks, str) else callbacks
        if not isinstance(listed, (list, tuple)):
            raise TypeError(f"callbacks={callbacks!r} is no list of callbacks or their paths")
        if not listed:
            raise ValueError("callbacks=[] has none; name one, or switch orca off: `-p no:orca`")
        self.callbacks = callbacks
        self._points = Points([callback_of(one) for one in listed])
        self._has_main = self._points.main is not None
        self._steps = self._has_main and self._points.overrides("on_iter_backward")
        self._adjusts = self._has_main and self._points.overrides("on_lr_adjust")
        self.conflicts: tuple[str, ...] = _NEED_A_LOSS_OF_THE_TASK if self._has_main else ()
        self.conflicts += _CHANGE_THE_STEP if self._steps else ()
        self._kept: dict[str, Any] = {}
        self._runner: Any = None
        self._eval_idx = 0

    @hookimpl
    def after_load(self, state: State) -> None:
        """Makes the runner; refuses what the main callback can't do."""
        self._runner = Runner(state, self._kept)
        if self._has_main:
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
        """The point `before_train_epoch`, also where an epoch goes on."""
        self._runner.epochs = state.clock.epoch
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

    @hookimpl(conditional=True)
    def forward(self, state: State) -> Any | None:
        """The point `on_train_forward`, which gives output and loss."""
        if not self._has_main or state.microbatch is None:
            return None
        return self._forward("on_train_forward")

    @hookimpl(conditional=True)
    def loss(self, state: State) -> Tensor | None:
        """Gives what the main callback's forward pass has left as the loss."""
        if not self._has_main:
            return None
        loss: Tensor | None = getattr(self._runner, "loss", None)
        if loss is None:
            raise PluginError(
                f"{self._main_name}'s forward pass left no loss",
                fix="let it assign runner.loss, a tensor of shape ()",
            )
        return loss

    @hookimpl
    def before_backward(self, state: State) -> None:
        """Shows the callbacks what there is now, whoever computed it."""
        self._runner.output, self._runner.loss = state.outputs, state.loss

    @hookimpl(conditional=True)
    def backward(self, state: State, loss: Tensor) -> bool | None:
        """The point `on_iter_backward`: gradients and step of a main callback that has it."""
        if not self._steps:
            return None
        self._runner.loss = loss
        self._tell("on_iter_backward")
        return True

    @hookimpl(conditional=True)
    def clip_gradients(
        self, state: State, optimizers: Mapping[str, Optimizer]
    ) -> dict[str, Tensor] | None:
        """Does nothing where the main callback has made the step."""
        return {} if self._steps else None

    @hookimpl(conditional=True)
    def optimizer_step(
        self, state: State, optimizers: Mapping[str, Optimizer], closure: Callable[[], Tensor]
    ) -> bool | None:
        """Says that the main callback has made the step."""
        return True if self._steps else None

    @hookimpl(conditional=True)
    def zero_grad(self, state: State, optimizers: Mapping[str, Optimizer]) -> bool | None:
        """Leaves gradients to a main callback that makes the step, which may add them up."""
        return True if self._steps else None

    @hookimpl(conditional=True)
    def scheduler_step(self, state: State, interval: str) -> bool | None:
        """The point `on_lr_adjust`, once an epoch."""
        if not self._adjusts:
            return None
        if interval == "ep":
            self._tell("on_lr_adjust")
        return True

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

    @hookimpl(conditional=True)
    def eval_forward(self, state: State) -> Any | None:
        """The point `on_val_forward`."""
        return self._forward("on_val_forward") if self._has_main else None

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

    @hookimpl(conditional=True)
    def predict_forward(self, state: State) -> Any | None:
        """The point `on_pred_forward`."""
        return self._forward("on_pred_forward") if self._has_main else None

    @hookimpl
    def predict_batch_end(self, state: State) -> None:
        """The point `after_pred_iter`; what it leaves as the output is returned."""
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
        """Gives what callbacks have put, and the state of those that have a `state_dict`."""
        return {
            "kept": {key: value for key, value in self._kept.items() if _can_be_saved(key, value)},
            "callbacks": {str(idx): one.state_dict() for idx, one in self._with_state()},
        }

    def load_state_dict(self, state: Mapping[str, Any], version: str) -> None:
        """Gives it back."""
        self._kept.clear()
        self._kept.update(state["kept"])
        for idx, one in self._with_state():
            if str(idx) in state["callbacks"]:
                one.load_state_dict(state["callbacks"][str(idx)])

    def _tell(self, point: str) -> None:
        self._points.call(point, self._runner)

    @property
    def _main_name(self) -> str:
        return type(self._points.main).__name__

    def _forward(self, point: str) -> Any:
        """Runs a forward pass of the main callback; gives the output that it left."""
        self._tell(point)
        output = getattr(self._runner, "output", None)
        if output is None:
            raise PluginError(
                f"{self._main_name}.{point} left no output",
                fix="let it assign runner.output",
            )
        return output

    def _with_state(self) -> Iterator[tuple[int, Any]]:
        for idx, one in enumerate(self._points.callbacks):
            methods = (getattr(one, name, None) for name in ("state_dict", "load_state_dict"))
            if all(map(callable, methods)):
                yield idx, one


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
