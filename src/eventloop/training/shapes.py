"""Shapes that torch would broadcast in a loss: an error, where torch warns."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from eventloop.errors import TaskError

# How torch's warning begins in mse_loss, l1_loss, smooth_l1_loss and huber_loss (2.13); it has no
# category of its own.
_BEGINNING = "Using a target size"


@contextmanager
def shapes_must_match() -> Iterator[None]:
    """Has a loss of outputs (16, 1) and targets (16,) be an error wherever it is computed.

    Broadcast to (16, 16), each output would be compared with all targets.

    Raises:
        TaskError: the shapes differ.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", _BEGINNING, UserWarning)
        try:
            yield
        except UserWarning as warning:
            sentence, *_ = str(warning).partition("This will likely")
            if not sentence.startswith(_BEGINNING):
                raise
            error = TaskError(
                "the loss was given shapes that differ and would be broadcast, each output compared "
                f"with all targets: {sentence.strip()}",
                fix="give both one shape, `outputs.squeeze(1)` or `targets.unsqueeze(1)` say; where "
                "broadcasting is meant, `torch.broadcast_tensors(outputs, targets)`",
            )
            for note in getattr(warning, "__notes__", ()):
                error.add_note(note)
            raise error from warning
