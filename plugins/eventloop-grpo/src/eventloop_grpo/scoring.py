"""From rewards to what the updates need: advantages, a row for each completion, and the table."""

# N = completion

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from eventloop import PluginError
from eventloop.toolbox import as_option
from eventloop_grpo.losses import Scale, advantages_of, centred
from eventloop_rollouts.rollouts import Rollouts


def summed(found: Sequence[Any], size: int, device: torch.device) -> Tensor:
    """Returns the sum of several rewards of each completion, float32.

    Raises:
        PluginError: there is none, or not one for each completion.
    """
    if not found:
        raise PluginError(
            "grpo: nothing judges the completions",
            fix=as_option("grpo", reward="./file.py:function")
            + ", or install a plugin with `reward`",
        )
    for one in found:
        if len(one) != size:
            raise PluginError(
                f"grpo: {size} completions have {len(one)} rewards",
                fix="return a number for each completion",
            )
    each = [torch.as_tensor(one, dtype=torch.float32, device=device) for one in found]
    return torch.stack(each).sum(0)


def scaled(
    rewards_N: Tensor, group_size: int, scale: Scale, all_gather: Callable[[Any], list[Any]]
) -> Tensor:
    """Returns the advantage of each completion; with "batch" collective."""
    if scale == "none":
        return centred(rewards_N, group_size)
    if scale == "group":
        return advantages_of(rewards_N, group_size)
    whole = [value for part in all_gather(rewards_N.tolist()) for value in part]
    return advantages_of(rewards_N, group_size, torch.tensor(whole).std().to(rewards_N.device))


def rows_of(rollouts: Rollouts, advantages_N: Tensor, *, mask_truncated: bool) -> dict[str, Tensor]:
    """Returns what an update needs, a row for each completion."""
    mask = rollouts.completion_mask
    attended = [rollouts.prompt_mask, mask.to(rollouts.prompt_mask.dtype)]
    if mask_truncated and rollouts.is_ended is not None:
        mask = mask * rollouts.is_ended[:, None]
    rows = {
        "tokens": torch.cat([rollouts.prompt_ids, rollouts.completion_ids], 1),
        "attended": torch.cat(attended, 1),
        "completion_mask": mask,
        "advantages": advantages_N,
    }
    return rows if rollouts.logps is None else rows | {"old_logps": rollouts.logps}


def table_of(
    rollouts: Rollouts, rewards_N: Tensor, advantages_N: Tensor, num: int
) -> dict[str, list[Any]]:
    """Returns the first completions as a table for the log."""
    return {
        "prompt": [*rollouts.prompts[:num]],
        "completion": [*rollouts.completions[:num]],
        "reward": rewards_N[:num].tolist(),
        "advantage": advantages_N[:num].tolist(),
    }
