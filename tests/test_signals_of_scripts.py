"""A script, and a command, that Ctrl-C ended tells its shell so, as any Python program does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os
import signal
import sys

from eventloop import Trainer, hookimpl
from eventloop_testing import tiny_task

WHEN, NUMBER = sys.argv[1], int(sys.argv[2])


def send():
    os.kill(os.getpid(), NUMBER)


class Sends:
    name = "sends"

    @hookimpl
    def batch_start(self, state):
        if WHEN == "fit":
            send()
        if WHEN == "twice":
            send(), send()

    @hookimpl
    def init(self, state):
        if WHEN == "build":
            send()

    @hookimpl
    def close(self):
        print("closed")


with Trainer(
    tiny_task(), callbacks=[Sends()], autoload=False, max_duration="9ba", device="cpu", run_dir="run"
) as trainer:
    trainer.fit()
print("not reached")
"""
ON_POSIX = pytest.mark.skipif(sys.platform == "win32", reason="has no signals")


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


@ON_POSIX
@pytest.mark.parametrize("when", ["fit", "twice", "build"])
def test_a_script_ends_by_sigint_after_ctrl_c(tmp_path, when):
    """With a status of 1 it looks as if it had failed, and the shell goes on with its loop."""
    (tmp_path / "script.py").write_text(SCRIPT)

    ran = run(tmp_path, sys.executable, "script.py", when, str(int(signal.SIGINT)))

    assert ran.returncode == -signal.SIGINT, ran.stderr
    assert ran.stdout == "closed\n"
    assert "\nKeyboardInterrupt" in ran.stderr
    assert (tmp_path / "run" / "checkpoints" / "ba00000001").is_dir() == (when == "fit")


@ON_POSIX
def test_a_script_ends_with_143_after_sigterm(tmp_path):
    """A scheduler sees the status that SIGTERM has in a shell."""
    (tmp_path / "script.py").write_text(SCRIPT)

    ran = run(tmp_path, sys.executable, "script.py", "fit", str(int(signal.SIGTERM)))

    assert (ran.returncode, ran.stdout, ran.stderr) == (143, "closed\n", "")


INTERRUPTED = """
import os
import signal

from eventloop import hookimpl
from eventloop_testing import tiny_task


class Interrupts:
    name = "interrupts"

    @hookimpl
    def batch_start(self, state):
        if state.clock.batch == 1 and state.rank == 0:
            pid = os.getppid() if state.world_size > 1 else os.getpid()
            os.kill(pid, signal.SIGINT)


def task():
    made = tiny_task(callbacks=[Interrupts()])
    made.settings = {"device": "cpu", "max_duration": "9ba"}
    return made
"""


@ON_POSIX
@pytest.mark.parametrize("nproc", ["", "--nproc 2"])
def test_a_loop_of_a_shell_ends_with_a_command_that_ctrl_c_ended(tmp_path, nproc):
    """Bash goes on with its script unless the program itself ended by SIGINT."""
    (tmp_path / "task.py").write_text(INTERRUPTED)
    command = f"{sys.executable} -m eventloop fit task.py --no-plugins --run-dir run$i {nproc}"
    # The shell gets Ctrl-C, too, and looks at how its child ended.
    script = f"trap : INT; for i in 1 2; do {command}; echo status $?; done"

    ran = run(tmp_path, "bash", "-c", script)

    assert ran.stdout.count("status 130") == 2
    assert ran.stderr.count("interrupted after batch") == 2
    assert "Traceback" not in ran.stderr
    process = run(tmp_path, *command.replace("$i", "3").split())
    assert process.returncode == -signal.SIGINT
