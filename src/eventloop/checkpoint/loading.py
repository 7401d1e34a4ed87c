"""Errors of code that loads a state; they name the state's path in the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from eventloop.errors import CheckpointError, EventloopError, text_of
from eventloop.safe_text import one_line

FIX = "use another checkpoint, or start a new run in another run_dir"
_MOST_CHARS = 300
# The exceptions of code that gets invalid values. Other failures, such as a lack of memory or a lost
# rank, must not be reported as a damaged checkpoint.
_OF_VALUES = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError)


@contextmanager
def loading(path: str, by: str = "") -> Iterator[None]:
    """Turns an exception raised while loading values into a CheckpointError that names them.

    Args:
        path: the path of the values in the checkpoint.
        by: the plugin that loads them; "" for the core.
    """
    import torch.distributed as dist

    try:
        yield
    except (EventloopError, torch.OutOfMemoryError):
        raise
    except _OF_VALUES as error:
        if dist.is_available() and isinstance(error, dist.DistError):
            raise
        fields: dict[str, Any] = {"by": by} if by else {}
        raise CheckpointError(
            f"{path!r} of the checkpoint can't be loaded: "
            f"{type(error).__name__}: {one_line(text_of(error), _MOST_CHARS)}",
            **fields,
            fix=FIX,
        ) from error
