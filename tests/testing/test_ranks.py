"""`run_ranks` says what a rank did that gave no result."""

from __future__ import annotations

import os
import threading

import pytest

from eventloop.testing import run_ranks
from eventloop.testing.ranks import RankError


def waits_for_ever():
    threading.Event().wait()


def test_a_rank_that_gives_no_result_in_time_is_shown_where_it_waits():
    """A timeout alone would leave one guessing which of many waits it was."""
    with pytest.raises(TimeoutError, match="no result from rank 1\n") as caught:
        run_ranks(lambda: os.environ["RANK"] == "0" or waits_for_ever(), timeout_s=1)

    assert "in waits_for_ever" in str(caught.value)


def test_a_rank_that_dies_is_named():
    """Nobody waits for what never comes."""
    with pytest.raises(RankError, match="rank 1 died"):
        run_ranks(lambda: os.environ["RANK"] == "0" or os._exit(1))
