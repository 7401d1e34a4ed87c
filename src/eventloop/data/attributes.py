"""Which attributes of an object its own code sets: no others are set by a name from a file."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any


def declares(target: Any, name: str) -> bool:
    """Whether an object has this attribute, or its class's code names it as one, and it is data.

    What the class itself has under the name, a method or a property, say, would be hidden by it.
    """
    of_class = inspect.getattr_static(type(target), name, None)
    if callable(of_class) or hasattr(type(of_class), "__get__") or name.startswith("__"):
        return False
    return name in getattr(target, "__dict__", {}) or any(
        name in code.co_names for code in _codes(type(target))
    )


def _codes(kind: type) -> Iterator[CodeType]:
    for one in kind.__mro__:
        for value in vars(one).values():
            function = inspect.unwrap(value) if callable(value) else value
            if isinstance(function, FunctionType):
                yield function.__code__
