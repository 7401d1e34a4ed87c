"""Processes that end with the one that started them."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time

import pytest

from eventloop.distributed.process_ends import end_process

PARENT = """
import subprocess, sys, time
from eventloop.distributed.process_ends import ending_with_parent

subprocess.Popen(
    [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(600)"],
    preexec_fn=ending_with_parent(),
)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells a process that it is alone")
def test_a_process_ends_with_a_parent_that_is_killed():
    """What a killed ablation leaves behind would hold the folder that the next one needs."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"here\n"

    parent.kill()

    # The child has the pipe, too: it ends with the last of the two.
    assert parent.communicate(timeout=60) == (b"", None)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_that_ends_leaves_its_parent_s_workers_alone():
    """It inherits the list of them, and would kill those that the parent still reads data with."""
    worker = multiprocessing.get_context("fork").Process(
        target=time.sleep, args=(600,), daemon=True
    )
    worker.start()
    try:
        if not (child := os.fork()):
            end_process(5)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        worker.join(0.5)
        assert worker.is_alive()
    finally:
        worker.kill()
        worker.join()
