"""The hooks that a method that learns from rollouts declares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from eventloop import hookspec

if TYPE_CHECKING:
    from eventloop import State
    from eventloop_llm.rollouts.completions import Rollouts


class RolloutHooks:
    """The hooks by which other packages generate and judge completions."""

    @hookspec(per="batch", firstresult=True)
    def rollout(  # type: ignore[empty-body]
        self, state: State, prompts: Rollouts, seeds: Sequence[int]
    ) -> Rollouts:
        """Returns the prompts with a completion of each.

        Called: once a batch, before its updates, in evaluation mode and without gradients; on every
        rank, with the rank's own prompts. By default the model generates by transformers.
        State: `batch`, the prompts as the data loader gave them.
        Must: depend on the model, the prompts and the seeds alone, so that a run that is killed
        generates the same again.
        May: return tensors of the host, as an engine has them.

        Args:
            prompts: each as often as there are completions of it, without completions.
            seeds: one for each completion, the same whatever the number of ranks.
        """

    @hookspec(per="batch", collection=True)
    def reward(self, state: State, rollouts: Rollouts) -> Tensor | Sequence[float] | None:
        """Returns how good each completion is, N numbers, or None; the rewards are added up.

        Called: once a batch, after `rollout`, on every rank with the rank's completions.
        """
