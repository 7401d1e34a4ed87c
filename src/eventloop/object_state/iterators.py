"""The positions of built-in iterators, if Python provides access to them."""

from __future__ import annotations

import ast
import itertools
import warnings
from typing import Any

from eventloop.object_state.not_savable import NotSavableError

_SEQUENCES: tuple[Any, ...] = ([], (), range(0), range(2**70), "", b"")
# Types of iterators whose position can be set.
SEQUENCE_ITERATORS = tuple(type(iter(sequence)) for sequence in _SEQUENCES)


def numbers_of_count(count: itertools.count[Any]) -> tuple[Any, Any]:
    """Returns the next number of a count and its step.

    Parses the representation, since newer versions of Python have no `__reduce__` for counts.
    """
    text = repr(count).removeprefix("count")
    try:
        numbers = ast.literal_eval(text if "," in text else f"({text[1:-1]},)")
    except (ValueError, SyntaxError):
        raise NotSavableError("it holds an itertools.count of values that aren't numbers") from None
    return numbers if len(numbers) == 2 else (*numbers, 1)


def items_of_cycle(cycle: itertools.cycle[Any]) -> tuple[list[Any], int]:
    """Returns the items of a cycle in order, and the number that the current round has yielded."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            reduction: Any = cycle.__reduce__()
        _, (inner,), (saved, is_first_done) = reduction
    except (AttributeError, TypeError, ValueError):  # Python 3.14 has removed `__reduce__`
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
    """Returns the sequence of a built-in iterator, and the position of the iterator in it."""
    _, (sequence,), *position = iterator.__reduce__()
    return sequence, position[0] if position else 0
