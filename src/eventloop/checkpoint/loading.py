"""Errors of code that loads a state: the part of the checkpoint that it was given is named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from eventloop.errors import CheckpointError, EventloopError, text_of
from eventloop.safe_text import one_line

FIX = "use another checkpoint, or start a new run in another run_dir"
_MOST_CHARS = 300
# The exceptions of code that is given values which it wasn't made for. A lack of memory, and a rank that
# is gone, raise others.
_OF_VALUES = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError)


@contextmanager
def loading(path: str, by: str = "") -> Iterator[None]:
    """Turns an exception raised while loading values into a CheckpointError that names them.

    Args:
        path: where the values are in the checkpoint.
        by: the owner of the code, if not the core.
    """
    import torch.distributed as dist

    try:
        yield
    except (EventloopError, torch.OutOfMemoryError):
        raise
    except _OF_VALUES as error:
        if dist.is_available() and isinstance(error, dist.DistError):
            raise
        facts: dict[str, Any] = {"by": by} if by else {}
        raise CheckpointError(
            f"{path!r} of the checkpoint can't be loaded: "
            f"{type(error).__name__}: {one_line(text_of(error), _MOST_CHARS)}",
            **facts,
            fix=FIX,
        ) from error
