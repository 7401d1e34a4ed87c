"""The words of other trainers, and what eventloop calls the same things: `vocabulary.toml` has them."""

from __future__ import annotations

import functools
import inspect
import tomllib
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from typing import Any, ParamSpec

from eventloop.errors import closest

P = ParamSpec("P")

_WORDS = tomllib.loads(resources.files("eventloop").joinpath("vocabulary.toml").read_text("utf-8"))

# By another trainer's word: the setting, and an example of its value.
SETTINGS: Mapping[str, tuple[str, Any]] = {
    word: (name, value) for word, (name, value) in _WORDS["settings"].items()
}
# Words of `SETTINGS` with which other trainers accumulate gradients over several batches.
ACCUMULATION = frozenset(_WORDS["accumulation"]["words"])
# By setting, and by the value's text in lower case.
VALUES: Mapping[str, Mapping[str, str]] = _WORDS["values"]
TRAINER: Mapping[str, str] = _WORDS["trainer"]
TASK: Mapping[str, str] = _WORDS["task"]
HOOK_WORDS: Mapping[str, str] = _WORDS["hooks"]
STATE: Mapping[str, str] = _WORDS["state"]
METHODS: Mapping[str, str] = _WORDS["methods"]
# By another trainer's word: the entry of [tool.eventloop] that chooses plugins.
RULES: Mapping[str, str] = _WORDS["rules"]
COMMAND_WORDS: Mapping[str, str] = _WORDS["commands"]


def known_as(name: str, words: Mapping[str, str], names: Iterable[str]) -> str:
    """Returns "; here it is ..." for a word of another trainer, else the closest of `names`."""
    return f"; here it is {words[name]}" if name in words else closest(name, names)


def names_unknown(
    hint: Callable[[str, Iterable[str]], str],
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorates a constructor: the error for an unknown keyword has a hint.

    Args:
        hint: takes the keyword and the valid names; returns "; the closest is ...", or "".

    Returns:
        The decorator. The constructor raises TypeError for an unknown keyword.
    """

    def decorate(function: Callable[P, None]) -> Callable[P, None]:
        parameter_names = frozenset(inspect.signature(function).parameters)
        owner = function.__qualname__.partition(".")[0]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> None:
            for name in kwargs:
                if name not in parameter_names:
                    raise TypeError(
                        f"{owner}(...) has no argument {name!r}{hint(name, parameter_names)}"
                    )
            return function(*args, **kwargs)

        return checked

    return decorate
