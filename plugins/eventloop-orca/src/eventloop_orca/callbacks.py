"""The base classes of callbacks, with the default behaviour of each point.

The specific points call the general ones (`before_train_iter` calls `before_iter`), which in turn call the
points of the document's second naming (`on_iter_begin`). Nothing here needs eventloop: any object with
the attributes can be the runner.
"""

from __future__ import annotations

from typing import Any


class Callback:
    """Does nothing at any point."""

    def before_run(self, runner: Any) -> None:
        """Called when a fit begins; `runner.num_epochs` may be changed."""
        self.on_run_begin(runner)

    def after_run(self, runner: Any) -> None:
        """Called when a fit ends."""
        self.on_run_end(runner)

    def before_epoch(self, runner: Any) -> None:
        """Called before every epoch, of training, validation or prediction."""
        self.on_epoch_begin(runner)

    def after_epoch(self, runner: Any) -> None:
        """Called after every epoch."""
        self.on_epoch_end(runner)

    def before_iter(self, runner: Any) -> None:
        """Called before every iteration, of training, validation or prediction."""
        self.on_iter_begin(runner)

    def after_iter(self, runner: Any) -> None:
        """Called after every iteration."""
        self.on_iter_end(runner)

    def before_train_epoch(self, runner: Any) -> None:
        """Called before an epoch of training."""
        self.before_epoch(runner)

    def after_train_epoch(self, runner: Any) -> None:
        """Called after an epoch of training and its validation."""
        self.after_epoch(runner)

    def before_train_iter(self, runner: Any) -> None:
        """Called before a batch is trained on."""
        self.before_iter(runner)

    def after_train_iter(self, runner: Any) -> None:
        """Called after the step."""
        self.after_iter(runner)

    def before_val_epoch(self, runner: Any) -> None:
        """Called before a validation."""
        self.before_epoch(runner)

    def after_val_epoch(self, runner: Any) -> None:
        """Called after a validation."""
        self.after_epoch(runner)

    def before_val_iter(self, runner: Any) -> None:
        """Called before a batch of a validation."""
        self.before_iter(runner)

    def after_val_iter(self, runner: Any) -> None:
        """Called after a batch of a validation."""
        self.after_iter(runner)

    def before_pred_epoch(self, runner: Any) -> None:
        """Called before a prediction."""
        self.before_epoch(runner)

    def after_pred_epoch(self, runner: Any) -> None:
        """Called after a prediction."""
        self.after_epoch(runner)

    def before_pred_iter(self, runner: Any) -> None:
        """Called before a batch to predict for."""
        self.before_iter(runner)

    def after_pred_iter(self, runner: Any) -> None:
        """Called after a batch to predict for."""
        self.after_iter(runner)

    def on_run_begin(self, runner: Any) -> None:
        """The second name of `before_run`."""

    def on_run_end(self, runner: Any) -> None:
        """The second name of `after_run`."""

    def on_epoch_begin(self, runner: Any) -> None:
        """The second name of `before_epoch`."""

    def on_epoch_end(self, runner: Any) -> None:
        """The second name of `after_epoch`."""

    def on_iter_begin(self, runner: Any) -> None:
        """The second name of `before_iter`."""

    def on_iter_end(self, runner: Any) -> None:
        """The second name of `after_iter`."""


class MainCallback(Callback):
    """Defines the parts of a step; at most a single callback of a run is a main callback."""

    def on_iter_forward(self, runner: Any) -> None:
        """Sets `runner.output` and `runner.loss`, from the batch's inputs and its target."""
        *inputs, target = runner.batch
        output = runner.model(*inputs)
        runner.output = output
        runner.target = target
        runner.loss = runner.criterion(*_listed(output), *_listed(target))

    def on_iter_backward(self, runner: Any) -> None:
        """Makes a step from `runner.loss`."""
        runner.optimizer.zero_grad()
        runner.loss.backward()
        runner.optimizer.step()

    def on_lr_adjust(self, runner: Any) -> None:
        """Steps the scheduler once per epoch, after its batches and before its validation."""
        if runner.scheduler is not None:
            runner.scheduler.step()

    def on_train_forward(self, runner: Any) -> None:
        """The forward pass of training."""
        self.on_iter_forward(runner)

    def on_val_forward(self, runner: Any) -> None:
        """The forward pass of a validation."""
        self.on_iter_forward(runner)

    def on_pred_forward(self, runner: Any) -> None:
        """Sets `runner.output` from the inputs of a batch without a target."""
        runner.output = runner.model(*runner.batch)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
