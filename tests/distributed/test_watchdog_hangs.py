"""A rank hangs, or waits where no other comes: all end, and the first line is about it."""

from __future__ import annotations

import os
import re
import time

import pytest

from eventloop.cli import main
from eventloop.distributed.rank_store import timeout_s
from eventloop.errors import SettingError

HANGS = """
import threading

from eventloop import hookimpl
from eventloop_testing import tiny_task


class Hangs:
    name = "hangs"

    @hookimpl
    def batch_end(self, state):
        if state.rank == 1 and state.clock.batch == 2:
            threading.Event().wait()


def task():
    made = tiny_task(callbacks=[Hangs()])
    made.settings |= {"device": "cpu", "max_duration": "2ep"}
    return made
"""


def test_a_hang_ends_with_the_place_of_each_rank(end_ranks, clean, monkeypatch):
    """The collective times out on the rank that waits; who made it wait comes first."""
    monkeypatch.setenv("EVENTLOOP_TIMEOUT_S", "4")
    (clean / "hangs.py").write_text(HANGS)

    statuses, err, _ = end_ranks(main, ["fit", "hangs.py", "--no-plugins"])

    first, *_ = err.splitlines()
    assert statuses == [1, 1]
    hangs = r"rank 1: hangs in batch_end of callback hangs \(Task\(callbacks=...\)\), at work/hangs.py:\d+"
    waits = r"rank 0 waits in epoch_end, at eventloop/[\w/]+.py:\d+"
    assert re.match(rf"{hangs}; {waits}: RuntimeError: .*Timed out waiting 4000ms", first)


@pytest.mark.nightly
def test_a_hang_that_ends_in_an_abort_is_told_likewise(end_ranks, clean, monkeypatch):
    """NCCL's timeout ends the process from C++, where nobody asks the ranks where they are."""
    monkeypatch.setenv("EVENTLOOP_TIMEOUT_S", "4")
    monkeypatch.setattr("eventloop.distributed.watchdog.post", lambda *_: os._exit(6))
    (clean / "hangs.py").write_text(HANGS)

    statuses, err, _ = end_ranks(main, ["fit", "hangs.py", "--no-plugins"])

    first, *_ = err.splitlines()
    assert statuses == [6, 1]
    assert re.match(
        r"rank 0: its process \d+ ended without reporting an error; before that: rank 0 ", first
    )
    assert "rank 1 in batch_end of callback hangs" in first


LEAVES = """
import torch
from torch.utils.data import DataLoader, TensorDataset

from eventloop import hookimpl
from eventloop_testing import tiny_task


class Leaves:
    name = "leaves"

    @hookimpl
    def should_stop(self, state):
        return state.rank in RANKS and state.clock.batch == 2


def task():
    made = tiny_task(algorithms=[Leaves()])
    samples = TensorDataset(torch.randn(48, 3), torch.arange(48) % 3)
    made.train_dataloader = DataLoader(samples, 2)
    made.settings |= {"device": "cpu", "max_duration": "2ep"}
    return made
"""


@pytest.mark.sampled(2)
@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "names"), [((0,), "rank 0"), ((0, 1), "ranks 0, 1")])
def test_ranks_that_leave_alone_are_named_long_before_a_timeout(end_ranks, clean, ranks, names):
    """The others wait in their backward pass, in which nothing is exchanged that would fail."""
    (clean / "leaves.py").write_text(LEAVES.replace("RANKS", repr(ranks)))
    start = time.monotonic()

    _, err, _ = end_ranks(main, ["fit", "leaves.py", "--no-plugins"], world_size=2 * len(ranks))

    first, *_ = err.splitlines()
    assert re.match(
        r"rank \d: TaskError: the ranks answered should_stop differently at batch 2: "
        rf"True on {names}, not on rank",
        first,
    )
    assert time.monotonic() - start < 60


@pytest.mark.sampled(2)
@pytest.mark.nightly
@pytest.mark.parametrize(("clause", "is_ended"), [("finally", True), ("except LookupError", False)])
def test_a_finally_that_waits_for_the_others_keeps_no_failure_back(
    end_ranks, clean, clause, is_ended
):
    """They never come; but an `except` may go on, and waits for those that are late."""
    (clean / "waits.py").write_text(
        HANGS.replace("import threading", "import time\n\nimport torch").replace(
            "            threading.Event().wait()",
            f"""            try:
                raise LookupError("on purpose")
            {clause}:
                torch.distributed.barrier()
        elif state.clock.batch == 2 and not {is_ended}:
            time.sleep(7)
            torch.distributed.barrier()""",
        )
    )

    statuses, err, _ = end_ranks(main, ["fit", "waits.py", "--no-plugins"])

    assert statuses == ([1, 1] if is_ended else [0, 0])
    assert err.startswith("rank 1: LookupError: on purpose") == is_ended


@pytest.mark.sampled(3)
@pytest.mark.nightly
@pytest.mark.parametrize("closing", ["time.sleep(1000)", "torch.distributed.barrier()"])
def test_a_rank_that_has_failed_waits_for_none_while_it_closes(end_ranks, clean, closing):
    """Its own watchdog ends it, with the status of the failure; no signal is taken for its end."""
    (clean / "closes.py").write_text(
        HANGS.replace("import threading", "import time\n\nimport torch")
        .replace("threading.Event().wait()", "raise LookupError('on purpose')")
        .replace(
            "\ndef task",
            f"""
    @hookimpl
    def close(self):
        {closing}


def task""",
        )
    )

    statuses, err, _ = end_ranks(main, ["fit", "closes.py", "--no-plugins"])

    assert statuses == [1, 1]
    assert err.startswith("rank 1: LookupError: on purpose; raised by plugin hangs")


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_the_timeout_is_a_number_of_seconds(text, monkeypatch):
    """An error in it would show after half an hour."""
    monkeypatch.setenv("EVENTLOOP_TIMEOUT_S", text)

    with pytest.raises(SettingError, match=re.escape(f"EVENTLOOP_TIMEOUT_S='{text}' isn't a")):
        timeout_s()
