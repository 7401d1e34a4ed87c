"""The report of a failure: first what happened and who did it, then where; once for all ranks."""

from __future__ import annotations

import os
import sys
import traceback
from datetime import timedelta

from eventloop.errors import EventloopError

_KEY = "eventloop/first_failure"
_LOST = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "Socket")
# Long enough for the rank that died to be told of, short enough for the promise of ten seconds.
_PATIENCE = timedelta(seconds=4)


def report(error: BaseException) -> None:
    """Writes to stderr what happened, who did it, and where.

    Of several ranks the first to fail reports; one that failed because another is gone is silent.
    """
    if in_ranks() and not _is_first_to_fail(error):
        return
    sys.stderr.write(f"{_first_line(error)}\n")
    if isinstance(error, EventloopError):
        lines = str(error).splitlines()[1:]
        notes = getattr(error, "__notes__", [])
        sys.stderr.write("".join(f"{line}\n" for line in [*lines, *notes]))
    else:
        traceback.print_exception(error)


def in_ranks() -> bool:
    """Tells whether this process is one of several that train together."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _first_line(error: BaseException) -> str:
    """Says what happened, and who did it as far as a note tells."""
    text, *_ = str(error).splitlines() or [""]
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    notes = [note.splitlines()[0] for note in getattr(error, "__notes__", []) if note]
    if not isinstance(error, EventloopError) and notes:
        line = f"{line}; {notes[0]}"
    return f"rank {os.environ['RANK']}: {line}" if in_ranks() else line


def _is_first_to_fail(error: BaseException) -> bool:
    """Asks the ranks' store; where it can't be reached, nobody else has told."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in __all__

    rank = os.environ["RANK"]
    try:
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=_PATIENCE,
        )
        key = f"{_KEY}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        if _lost_another(error):
            store.wait([key], _PATIENCE)
        return store.compare_set(key, "", rank).decode() == rank
    except (RuntimeError, OSError, KeyError, ValueError):
        return True


def _lost_another(error: BaseException) -> bool:
    """Tells whether an exception came of another rank's end."""
    import torch.distributed as dist

    text = str(error)
    is_gone = isinstance(error, RuntimeError) and any(word in text for word in _LOST)
    return isinstance(error, dist.DistError) or is_gone
