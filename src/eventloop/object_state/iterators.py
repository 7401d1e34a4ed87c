"""Positions of built-in iterators, as far as Python shows them."""

from __future__ import annotations

import ast
import itertools
import warnings
from typing import Any

from eventloop.object_state.not_savable import NotSavableError

_SEQUENCES: tuple[Any, ...] = ([], (), range(0), range(2**70), "", b"")
# Iterators that can be set to a position.
SEQUENCE_ITERATORS = tuple(type(iter(sequence)) for sequence in _SEQUENCES)


def numbers_of_count(count: itertools.count[Any]) -> tuple[Any, Any]:
    """Returns the next number of a count and its step.

    From the representation: later Pythons have no `__reduce__` of it.
    """
    text = repr(count).removeprefix("count")
    try:
        numbers = ast.literal_eval(text if "," in text else f"({text[1:-1]},)")
    except (ValueError, SyntaxError):
        raise NotSavableError("it holds a count of other things than numbers") from None
    return numbers if len(numbers) == 2 else (*numbers, 1)


def items_of_cycle(cycle: itertools.cycle[Any]) -> tuple[list[Any], int]:
    """Returns the items of a cycle in order, and how many of them the current round has yielded."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            reduction: Any = cycle.__reduce__()
        _, (inner,), (saved, is_first_done) = reduction
    except (AttributeError, TypeError, ValueError):  # Python 3.14 has no such method
        raise NotSavableError("it holds an itertools.cycle, whose position can't be read") from None
    if type(inner) not in SEQUENCE_ITERATORS:
        raise NotSavableError(f"it holds a cycle over a {type(inner).__name__}")
    sequence, position = position_of(inner)
    remaining = list(sequence)[position:]
    if is_first_done:
        num_yielded = len(saved) - len(remaining)
        return [*saved], num_yielded % max(len(saved), 1)
    return [*saved, *remaining], len(saved)


def position_of(iterator: Any) -> tuple[Any, int]:
    """Returns the sequence that a built-in iterator is over, and its position in it."""
    _, (sequence,), *position = iterator.__reduce__()
    return sequence, position[0] if position else 0
