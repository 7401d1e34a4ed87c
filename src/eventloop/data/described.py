"""What values are in a few words: types and shapes, for messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

_MOST = 6
_MOST_CHARS = 300


def shapes(value: Any) -> str:
    """Returns types and shapes of a nest: `(float32 (4, 3), int64 (4,))`."""
    text = _shapes(value, depth=3)
    return text if len(text) <= _MOST_CHARS else f"{text[: _MOST_CHARS - 3]}..."


def _shapes(value: Any, depth: int) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if not depth or not isinstance(value, Mapping | tuple | list):
        return _plain(value)
    more = ", ..." if len(value) > _MOST else ""
    if isinstance(value, Mapping):
        pairs = [f"{key!r}: {_shapes(one, depth - 1)}" for key, one in [*value.items()][:_MOST]]
        return f"{{{', '.join(pairs)}{more}}}"
    parts = [_shapes(one, depth - 1) for one in value[:_MOST]]
    if len(value) > 2 and len(set(parts)) == 1:
        return f"{len(value)} times {parts[0]}"
    return (
        f"({', '.join(parts)}{more})" if isinstance(value, tuple) else f"[{', '.join(parts)}{more}]"
    )


def _plain(value: Any) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:  # NumPy's
        return f"{type(value).__name__} {dtype} {tuple(shape)}"
    return type(value).__name__
