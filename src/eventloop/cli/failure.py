"""The report of a failure on stderr: once for all ranks."""

from __future__ import annotations

import sys

from eventloop.distributed.reports import details, first_line, in_ranks
from eventloop.signals import is_agreed


def report(error: BaseException) -> None:
    """Writes to stderr what happened, who did it, and where.

    Of several ranks the first to fail reports; the others see to it that it is done.
    """
    text = f"{first_line(error)}\n{details(error)}"
    if in_ranks():
        _report_once(error, text)
    else:
        sys.stderr.write(text)


def _report_once(error: BaseException, text: str) -> None:
    from eventloop.distributed.failure_store import (  # one process needs nothing of them
        bulletin,
        wait_until,
    )
    from eventloop.distributed.watchdog import GRACE_S, post

    board = bulletin()
    try:
        if board is not None:
            first = None if is_agreed(error) else post(board, error)
            if first is not None:
                text = first.report
            if first is not None and first.told_by != board.rank:
                # Whoever ends now is taken for the culprit, and the others are stopped.
                wait_until(board.is_told, GRACE_S)
            if not board.claim():
                return
    except RuntimeError:  # the store is gone, and with it the others
        board = None
    sys.stderr.write(text)
    sys.stderr.flush()
    if board is not None:
        board.set_told()
