"""What a process that doesn't end waits for, and how it is ended."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading

import pytest

from eventloop.distributed.late_end import waits_in

MAIN = threading.get_ident()


def wait_at(gate: threading.Event) -> None:
    gate.wait()


def test_threads_that_are_no_daemons_are_named_with_their_lines():
    """Python waits for them before any exit handler runs."""
    gate = threading.Event()
    threads = [
        threading.Thread(target=wait_at, args=(gate,), name="uploads"),
        threading.Thread(target=wait_at, args=(gate,), name="helper", daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        text = waits_in(MAIN)
    finally:
        gate.set()
        for thread in threads:
            thread.join()

    assert text.startswith("it waits for the thread 'uploads', at distributed/test_late_end.py:")
    assert "helper" not in text


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_processes_that_multiprocessing_waits_for_are_named():
    """Its exit handler joins those that are no daemons."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=theirs.recv, name="reader")
    process.start()
    try:
        text = waits_in(MAIN)
    finally:
        ours.send(None)
        process.join()

    assert text == f"it waits for the process 'reader' ({process.pid})"


HANGS = """
import atexit, ctypes, sys, threading, time
from eventloop.distributed.late_end import limit_end

def handler():
    while True:
        time.sleep(0.01)

print("all is written", end="")
if sys.argv[1] == "python":
    atexit.register(handler)
elif sys.argv[1] == "c":
    atexit.register(time.sleep, 1000)
elif sys.argv[1] == "thread":
    threading.Thread(target=handler, name="\\x1b[31muploads").start()
limit_end("1", 0.5)
"""


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("python", "it is in an exit handler, at"),
        ("c", "it is in an exit handler that isn't written in Python"),
        ("thread", r"it waits for the thread '\x1b[31muploads', at"),
    ],
)
def test_a_process_that_hangs_at_its_end_is_ended_with_the_reason(tmp_path, way, reason):
    """Otherwise its launcher waits for ever, and no line names it."""
    (tmp_path / "hangs.py").write_text(HANGS)

    ran = subprocess.run(
        [sys.executable, "hangs.py", way],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert (ran.returncode, ran.stdout) == (1, "all is written")
    assert ran.stderr.startswith("rank 1: its process ")
    assert f"hasn't ended 0.5 s after the run: {reason}" in ran.stderr
    assert "\x1b" not in ran.stderr
    assert ran.stderr.splitlines()[1].startswith("  fix  end it in the plugin's `close`")


def test_a_process_that_ends_in_time_says_nothing(tmp_path):
    """Control."""
    (tmp_path / "hangs.py").write_text(HANGS)

    ran = subprocess.run(
        [sys.executable, "hangs.py", "not"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "all is written", "")
