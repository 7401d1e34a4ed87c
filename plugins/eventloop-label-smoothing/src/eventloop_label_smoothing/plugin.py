"""The plugin: when the loss is smoothed, and where it can't be."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from eventloop import State, TaskError, hookimpl
from eventloop.toolbox import Microbatches, describe, switch_off
from eventloop_label_smoothing.smoothing import SmoothedAlreadyError, SmoothedCrossEntropy


class LabelSmoothing:
    """Takes a little of each target's certainty, and spreads it evenly over all classes.

    Every `cross_entropy` in the task's loss gets torch's own `label_smoothing`, for class indices
    and for probabilities. Evaluation sees the loss as it is.

    Args:
        epsilon: the share that is spread, in (0, 1]. The paper takes 0.1.

    Raises:
        TypeError: `epsilon` is not a number.
        ValueError: it is outside (0, 1].

    Source: Szegedy et al. 2016, arXiv:1512.00567, section 7.
    """

    def __init__(self, *, epsilon: float = 0.1) -> None:
        if not isinstance(epsilon, int | float):
            raise TypeError(f"epsilon={epsilon!r} is not a number; the paper takes 0.1")
        if not 0 < epsilon <= 1:
            raise ValueError(f"epsilon={epsilon!r} isn't in (0, 1]; the paper takes 0.1")
        self.epsilon = epsilon
        self._smoothed = SmoothedCrossEntropy(epsilon)
        self._whole_at = -1  # the batch whose loss, as a whole, was smoothed last

    @hookimpl
    def unsuitable(self, state: State) -> str | None:
        """Returns why the plugin can't be used: no loss takes outputs and classes; None if it can."""
        if state.owner("loss") == "core":
            return (
                "the loss is the model's own; Task(loss=...) that calls cross_entropy is smoothed"
            )
        owner = state.owner("train_batch")
        if owner != "core":
            return f"train_batch is {owner}'s, which has losses of its own"
        if not _may_be_classes(state.targets):
            if isinstance(state.batch, Microbatches):
                return (
                    f"it smooths the targets of a batch in one piece, not {describe(state.batch)}"
                )
            return "the targets are neither classes nor their probabilities"
        return None

    @hookimpl(wrapper=True)
    def loss(self, state: State) -> Generator[None, Tensor, Tensor]:
        """Computes the loss with smoothed targets, whichever wrappers run inside or outside it."""
        if state.settings.compile is not False:
            # A loss that was compiled with the forward pass isn't smoothed. For another object of
            # a batch it is computed anew.
            state.targets = state.targets
        num_calls = self._smoothed.num_calls
        try:
            with self._smoothed:
                loss = yield
        except SmoothedAlreadyError as error:
            raise TaskError(str(error), fix="leave one of them out: " + _way_out()) from error
        is_smoothed = self._smoothed.num_calls > num_calls
        if is_smoothed and state.microbatch is None:
            self._whole_at = state.clock.batch
        # Of a batch whose loss is one of all samples, microbatches have losses that stand for it.
        if not is_smoothed and (state.microbatch is None or self._whole_at != state.clock.batch):
            raise TaskError(
                "label-smoothing found nothing to smooth: the loss doesn't call torch's "
                "cross_entropy",
                fix=_way_out() + ", or compute the loss with torch.nn.functional.cross_entropy",
            )
        return loss


def _way_out() -> str:
    return "switch label-smoothing off with " + switch_off("label-smoothing")


def _may_be_classes(targets: object) -> bool:
    """Returns whether targets are class indices or probabilities; waits for the device."""
    if not isinstance(targets, Tensor):
        return False
    if not targets.is_floating_point():
        return True
    sums = [targets.double().sum(dim) for dim in (1, -1) if targets.ndim > 1]
    return any(torch.allclose(one, torch.ones_like(one), atol=1e-2) for one in sums)
