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
    """Returns the function that a label names; a function or None is returned unchanged.

    Raises:
        ValueError: the label names none.
    """
    if not isinstance(reward, str):
        if reward is not None and not callable(reward):
            raise ValueError(f"reward={reward!r} is neither a name nor a function")
        return reward
    place, _, name = reward.rpartition(":")
    if not place or not name.isidentifier():
        raise ValueError(
            f"reward={reward!r} names no function; write module:function or ./file.py:function"
        )
    module = _module_at(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{place} has no function {name!r}")
    return function


def _module_at(path: Path) -> ModuleType:
    """Imports a file; its folder is the last place where its own imports are looked for."""
    path = path.absolute()
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return module_of_file(f"eventloop_reward_{path.stem}", path)


def summed(rewards: Sequence[Any], size: int, device: torch.device) -> Tensor:
    """Returns the sum of several rewards of each completion, float32.

    Raises:
        PluginError: there is none, or not one for each completion.
    """
    if not rewards:
        raise PluginError(
            "grpo: nothing judges the completions",
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
    """Returns the advantage of each completion; with "batch" collective."""
    if scale == "none":
        return centred(rewards_N, group_size)
    if scale == "group":
        return advantages_of(rewards_N, group_size)
    whole = [value for part in all_gather(rewards_N.tolist()) for value in part]
    return advantages_of(rewards_N, group_size, torch.tensor(whole).std().to(rewards_N.device))


def rows_of(rollouts: Rollouts, advantages_N: Tensor, *, mask_truncated: bool) -> dict[str, Tensor]:
    """Returns the tensors of an update, with a row for each completion."""
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
