"""The way into the command."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import eventloop


@pytest.mark.parametrize("argv", [["--help"], ["-h"]])
def test_help_names_every_command(run, argv):
    """It is the first thing that a newcomer types."""
    ran = run(*argv)

    assert ran.status == 0
    for command in ("fit", "eval", "predict", "checkpoints", "export", "plugins"):
        assert f"  {command}" in ran.out


def test_version_is_the_package_s(run):
    """A report of a bug begins with it."""
    assert run("--version").out == f"eventloop {eventloop.__version__}\n"


def test_no_command_is_wrong_usage(run):
    """A script that forgets it must not succeed."""
    ran = run()

    assert (ran.status, ran.out) == (2, "")
    assert "usage: eventloop" in ran.err


def test_an_unknown_command_is_refused_with_the_closest(run):
    """And nothing else is printed."""
    ran = run("fti", "tiny.py")

    assert ran.status == 2
    assert ran.err.startswith("UsageError: there is no command 'fti'; the closest is 'fit'\n")


def test_the_first_line_of_a_failure_is_what_torchrun_reads(run, tmp_path, monkeypatch):
    """Its summary, and tables of many runs, need the reason without a search in the log."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))

    ran = run("fti", "tiny.py")

    assert json.loads(file.read_text())["message"] == ran.err.partition("\n")[0]


@pytest.mark.parametrize("command", ["fit", "eval", "predict"])
def test_a_missing_task_is_wrong_usage(run, clean, command):
    """The message shows what to type."""
    ran = run(command)

    assert ran.status == 2
    assert f"`eventloop {command} examples/digits.py`" in ran.err


def test_python_m_eventloop_is_the_command():
    """It works where the scripts of an environment aren't on the path."""
    done = subprocess.run(
        [sys.executable, "-m", "eventloop", "--version"], capture_output=True, text=True, check=True
    )

    assert done.stdout == f"eventloop {eventloop.__version__}\n"


def test_an_interrupt_is_no_traceback(run, clean):
    """130 is what shells expect of Ctrl-C."""
    (clean / "slow.py").write_text("raise KeyboardInterrupt")

    assert run("fit", "slow.py") == (130, "", "interrupted\n")


@pytest.mark.parametrize("kind", ["KeyboardInterrupt", "SystemExit"])
def test_a_plugin_that_raises_an_interrupt_has_failed(run, tiny, kind):
    """A person's Ctrl-C is told from it; 0 or 130 would hide that nothing was trained."""
    hook = f"    @hookimpl\n    def batch_end(self):\n        raise {kind}\n"
    (tiny / "bad.py").write_text(f"from eventloop import hookimpl\n\n\nclass Bad:\n{hook}")

    ran = run("fit", "tiny.py", "--no-plugins", "-p", "./bad.py:Bad")

    assert ran.status == 1
    assert ran.err.startswith(f"{kind}; raised by plugin bad (./bad.py:Bad) in batch_end, epoch 1")


def test_nobody_reading_is_no_error():
    """`eventloop plugins | head -1` is a normal thing to do."""
    process = subprocess.Popen(
        [sys.executable, "-m", "eventloop", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    process.wait()

    assert errors == b""


LOOKS = """
import gc
at_import = gc.isenabled()
from tiny import task as build

def task():
    print(f"collects: {at_import}, then {gc.isenabled()}")
    return build()
"""


@pytest.mark.nightly
def test_garbage_is_collected_from_where_the_task_is_built(tiny):
    """Imports leave none, and looking for it took a quarter of the start; training leaves some."""
    (tiny / "looks.py").write_text(LOOKS)

    done = subprocess.run(
        [sys.executable, "-m", "eventloop", "fit", "looks.py", "--max-duration", "1ba"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert done.stdout.startswith("collects: False, then True\n")
