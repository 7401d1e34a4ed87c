"""Options of the plugin: what they may be, and what their names stand for."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from eventloop.toolbox.run_files import spec_of_file
from eventloop_grpo.losses import LOSSES, SCALES

if TYPE_CHECKING:
    from eventloop_grpo.plugin import Grpo


def check_options(given: Grpo) -> None:
    """Checks the values.

    Raises:
        ValueError: one is out of its range.
    """
    for name, least in (
        ("num_generations", 2), ("max_tokens", 1), ("num_iterations", 1), ("steps_per_generation", 1),
    ):  # fmt: skip
        value = getattr(given, name)
        if type(value) is not int or value < least:
            raise ValueError(f"{name}={value!r} is not an int of {least} or more")
    if given.top_k is not None and given.top_k < 1:
        raise ValueError(f"top_k={given.top_k!r} is not an int of 1 or more")
    for name in ("temperature", "top_p"):
        if not getattr(given, name) > 0:
            raise ValueError(f"{name}={getattr(given, name)!r} isn't a positive number")
    if given.top_p > 1:
        raise ValueError(f"top_p={given.top_p!r} isn't in (0, 1]")
    if not 0 < given.epsilon < 1:
        raise ValueError(f"epsilon={given.epsilon!r} isn't in (0, 1)")
    if given.epsilon_high is not None and given.epsilon_high <= 0:
        raise ValueError(f"epsilon_high={given.epsilon_high!r} isn't a positive number")
    if given.beta < 0:
        raise ValueError(f"beta={given.beta!r} is negative")
    for name, value, known in (
        ("loss", given.loss_kind, LOSSES),
        ("scale_rewards", given.scale_rewards, SCALES),
    ):
        if value not in known:
            raise ValueError(f"{name}={value!r} is none of {', '.join(map(repr, known))}")


def named_reward(reward: str | Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Returns the function that a label names, or the one that was given.

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
    module = _file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{place} has no function {name!r}")
    found: Callable[..., Any] = function
    return found


def named_tokenizer(tokenizer: Any) -> Any:
    """Returns the tokenizer in a folder, or the one that was given."""
    if not isinstance(tokenizer, str):
        return tokenizer
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer)


def _file(path: Path) -> ModuleType:
    """Imports a file; its folder is the last place where its own imports are looked for."""
    path = path.absolute()
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = spec_of_file(f"eventloop_reward_{path.stem}", path)
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
