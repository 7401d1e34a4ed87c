"""Resolves the names in options: of a reward function, of a tokenizer."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from eventloop.toolbox import module_of_file


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
    module = _file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{place} has no function {name!r}")
    found: Callable[..., Any] = function
    return found


def named_tokenizer(tokenizer: Any) -> Any:
    """Loads a tokenizer by path; anything that isn't a string is returned unchanged."""
    if not isinstance(tokenizer, str):
        return tokenizer
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer)


def _file(path: Path) -> ModuleType:
    """Imports a file; its folder is the last place where its own imports are looked for."""
    path = path.absolute()
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return module_of_file(f"eventloop_reward_{path.stem}", path)
