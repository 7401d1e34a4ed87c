"""Blended samples, each with two targets in known shares; plugins that make them share the batches."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor

from eventloop.errors import TaskError
from eventloop.fixes import switch_off

if TYPE_CHECKING:
    from eventloop.state import State

Result = TypeVar("Result")
Number = TypeVar("Number", float, Tensor)


class SharesBatches(Protocol):
    """A plugin that shares the batches with others of its kind.

    Attributes:
        takes_turns: the word that all plugins of the kind have, such as "blend".
    """

    takes_turns: str


def owns_batch(state: State, plugin: SharesBatches) -> bool:
    """Returns whether the plugin owns the current batch, among the active plugins of its kind.

    Plugins with the same `takes_turns` share the batches: for each batch one of them is drawn, all
    equally often. The draw is a function of the seed and the batch's number, so all plugins, all ranks
    and a resumed run agree. A plugin that is alone owns every batch.
    """
    kind = plugin.takes_turns
    sharing = sorted(name for name, one in state.plugin_facts.items() if one.takes_turns == kind)
    if len(sharing) < 2:
        return True
    draw = random.Random(f"{state.settings.seed}/{kind}/{state.clock.batch}")
    return state.plugins[draw.choice(sharing)] is plugin


class SecondTargets:
    """The second targets of a batch of blends, and the loss of both.

    `state.targets` keeps the originals, so that metrics and losses of class indices go on working.
    A plugin gives the second ones in `before_train_batch`, and lets its `unsuitable` and its wrappers
    of three actions do what those of the same name do here: `return self.second.unsuitable(state)`,
    `return (yield from self.second.loss(state))`.

    Args:
        plugin: whose they are, for messages.
    """

    def __init__(self, plugin: str) -> None:
        self._plugin = plugin
        self._targets: Tensor | None = None
        self._share = 1.0
        self._parts: list[Tensor] = []
        self._are_seen = False

    @property
    def are_given(self) -> bool:
        """Whether second targets are set for the current batch."""
        return self._targets is not None

    def unsuitable(self, state: State) -> str | None:
        """Returns why this training would ignore second targets, or why samples can't be blended; None if they can."""
        if state.owner("loss") == "core":
            return "the loss is the model's own and sees no second targets; give Task(loss=...)"
        owner = state.owner("train_batch")
        if owner != "core":
            return f"train_batch is {owner}'s, whose losses see no second targets"
        if state.owner("split_batch") == "task":
            return "split_batch is task's: the loss may be one over pairs of samples"
        for name, facts in state.plugin_facts.items():
            if not facts.loss_splits:
                return f"the loss compares the samples of a batch: {name} has loss_splits=False"
        return None

    def give(self, targets: Tensor, share: float) -> None:
        """Sets the second targets of the current batch.

        Args:
            targets: of the whole batch, a row a sample.
            share: of the originals in the loss, in [0, 1].
        """
        self._targets, self._share, self._are_seen = targets, share, False

    def train_batch(self, state: State) -> Generator[None, Result, Result]:
        """Forgets them when the step is done: the closure of a step still needs them.

        Raises:
            TaskError: no loss was asked for, as by an owner of `train_batch` that may pass.
        """
        try:
            result = yield
            if self.are_given and not self._are_seen:
                raise self._unseen("train_batch asked for none")
            return result
        finally:
            self._targets, self._parts = None, []

    def split_batch(self, state: State) -> Generator[None, Sequence[Any], Sequence[Any]]:
        """Splits them as the batch is split, whichever plugin does it."""
        microbatches = yield
        if self._targets is not None:
            originals = state.targets
            state.targets = self._targets
            try:
                self._parts = [targets for _, targets in state.again()]
            finally:
                state.targets = originals
        return microbatches

    def loss(self, state: State) -> Generator[None, Tensor, Tensor]:
        """Blends the loss of the originals with that of the second ones, which it asks for.

        A loss of the whole batch, which is none of the passes over it, stays as it is.

        Raises:
            TaskError: the loss doesn't look at targets.
        """
        original = yield
        if self._targets is None or state.microbatch is None:
            return original
        self._are_seen = True
        targets = state.targets
        state.targets = self._parts[state.microbatch_idx]
        try:
            other: Tensor = state.again()
        finally:
            state.targets = targets
        if other is original:
            raise self._unseen(f"this one is part of the model's {type(state.outputs).__name__}")
        return blended(original, other, self._share)

    def _unseen(self, reason: str) -> TaskError:
        return TaskError(
            f"{self._plugin} needs a loss of outputs and targets, but {reason}: the second "
            "targets would be ignored",
            fix=f"give Task(loss=...), or switch {self._plugin} off with "
            + switch_off(self._plugin),
        )


def blended(original: Number, other: Number, share: float) -> Number:
    """Blends two losses: share * original + (1 - share) * other.

    It equals the loss of targets that are blended so wherever the loss is linear in them, as
    cross-entropy is.
    """
    return share * original + (1 - share) * other
