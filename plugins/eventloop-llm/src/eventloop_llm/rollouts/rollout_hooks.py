"""The hooks of methods that learn from rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from eventloop import hookspec

if TYPE_CHECKING:
    from eventloop import State
    from eventloop_llm.rollouts.completions import Rollouts


class RolloutHooks:
    """Hooks through which other packages generate completions and reward them."""

    @hookspec(per="batch", firstresult=True)
    def rollout(  # type: ignore[empty-body]
        self, state: State, prompts: Rollouts, seeds: Sequence[int]
    ) -> Rollouts:
        """Returns the prompts with a completion of each.

        Called: once a batch, before its updates, in evaluation mode and without gradients; on every
        rank, with the rank's own prompts. By default the model generates with transformers.
        State: `batch`, the prompts as the data loader returned them.
        Must: depend only on the model, the prompts and the seeds, so that a run that is killed and
        resumed generates the same completions.
        May: return tensors on the host, as inference engines do.

        Args:
            prompts: each repeated once per completion, without completions.
            seeds: a seed for each completion, independent of the number of ranks.
        """

    @hookspec(per="batch", collection=True)
    def reward(self, state: State, rollouts: Rollouts) -> Tensor | Sequence[float] | None:
        """Returns a reward for each completion, N numbers, or None; rewards of all plugins are added up.

        Called: once a batch, after `rollout`, on every rank with the rank's completions.
        """
