"""Processes that end with the one that started them."""

from __future__ import annotations

import subprocess
import sys

import pytest

PARENT = """
import subprocess, sys, time
from eventloop.distributed.exit import ending_with_parent

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
