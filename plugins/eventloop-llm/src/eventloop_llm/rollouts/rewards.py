"""From a reward function to the rows of an update: rewards, advantages, and the table of the log."""

# N = completion

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from eventloop import PluginError
from eventloop.toolbox import as_option, module_of_file
from eventloop_llm.rollouts.completions import Rollouts
from eventloop_llm.rollouts.policy_losses import Scale, advantages_of, centred


def named_reward(reward: str | Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Imports the function named by module:function or ./file.py:function; returns functions and None unchanged.

    Raises:
        ValueError: there is no such function.
    """
    if not isinstance(reward, str):
        if reward is not None and not callable(reward):
            raise ValueError(f"reward={reward!r} is neither a name nor a function")
        return reward
    module_or_file, _, name = reward.rpartition(":")
    if not module_or_file or not name.isidentifier():
        raise ValueError(
            f"reward={reward!r} names no function; write module:function or ./file.py:function"
        )
    module = (
        _module_at(Path(module_or_file))
        if module_or_file.endswith(".py")
        else importlib.import_module(module_or_file)
    )
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{module_or_file} has no function {name!r}")
    return function


def _module_at(path: Path) -> ModuleType:
    """Imports a file; appends its folder to `sys.path` for imports of neighbouring files."""
    path = path.absolute()
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return module_of_file(f"eventloop_reward_{path.stem}", path)


def summed(rewards: Sequence[Any], size: int, device: torch.device) -> Tensor:
    """Returns the sum of the rewards of each completion, float32.

    Raises:
        PluginError: there are no rewards, or not as many as completions.
    """
    if not rewards:
        raise PluginError(
            "grpo: no reward function judges the completions",
            fix=as_option("grpo", reward="./file.py:function")
            + ", or install a plugin with `reward`",
        )
    for values in rewards:
        if len(values) != size:
            raise PluginError(
                f"grpo: {size} completions have {len(values)} rewards",
                fix="return a number for each completion",
            )
    tensors = [torch.as_tensor(values, dtype=torch.float32, device=device) for values in rewards]
    return torch.stack(tensors).sum(0)


def scaled(
    rewards_N: Tensor, group_size: int, scale: Scale, all_gather: Callable[[Any], list[Any]]
) -> Tensor:
    """Returns the advantage of each completion; collective with "batch"."""
    if scale == "none":
        return centred(rewards_N, group_size)
    if scale == "group":
        return advantages_of(rewards_N, group_size)
    all_rewards = [
        value for rank_rewards in all_gather(rewards_N.tolist()) for value in rank_rewards
    ]
    return advantages_of(
        rewards_N, group_size, torch.tensor(all_rewards).std().to(rewards_N.device)
    )


def rows_of(rollouts: Rollouts, advantages_N: Tensor, *, mask_truncated: bool) -> dict[str, Tensor]:
    """Returns the tensors for an update, a row for each completion."""
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
