"""`eventloop fit` calls each plugin's constructor once, and compares the lock with what it built."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

WATCH = """
import os
from pathlib import Path
from eventloop import hookimpl

def note(text):
    with Path("noted").open("a") as file:
        file.write(f"{os.environ.get('RANK', '0')} {text}\\n")

class Watch:
    name = "watch"

    def __init__(self):
        note("built")

    @hookimpl
    def epoch_end(self): ...

    @hookimpl
    def close(self):
        note("closed")
"""
ALGORITHM = """
from eventloop import hookimpl

class Plugin:
    @hookimpl
    def unsuitable(self, state):
        return {reason!r}

    @hookimpl
    def before_forward(self, state): ...
"""
QUICK = ("fit", "tiny.py", "--max-duration", "1ep", "--device", "cpu")
WATCHED = ("--no-plugins", "-p", "watch.py:Watch")


@pytest.fixture
def watched(tiny):
    """A project with a plugin that notes when it is built and closed."""
    (tiny / "watch.py").write_text(WATCH)
    (tiny / "pyproject.toml").touch()
    return tiny


def noted(folder: Path) -> list[str]:
    """Returns the notes, and forgets them."""
    path = folder / "noted"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


@pytest.mark.parametrize("flag", ["", "--check", "--dry-run", "--print-config"])
def test_a_constructor_runs_once_with_a_lock(run, watched, flag):
    """A constructor may open a session at a service, which a second one would leave open."""
    assert run("plugins", "lock", *WATCHED).status == 0
    noted(watched)

    ran = run(*QUICK, *WATCHED, *filter(None, [flag]))

    assert ran.status == 0, ran.err
    assert noted(watched) == ([] if flag == "--print-config" else ["0 built", "0 closed"])


@pytest.mark.nightly
def test_a_constructor_runs_once_in_each_rank(watched, run):
    """Each rank compares the lock with the plugins that it built itself."""
    assert run("plugins", "lock", *WATCHED).status == 0
    noted(watched)

    command = [sys.executable, "-m", "eventloop", *QUICK, *WATCHED, "--nproc", "2"]
    done = subprocess.run(
        command, cwd=watched, env={**os.environ}, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert Counter(noted(watched)) == {
        "0 built": 1,
        "0 closed": 1,
        "1 built": 1,
        "1 closed": 1,
    }


def test_plugins_that_differ_from_the_lock_are_closed(run, watched):
    """They have been built for the run, so that the comparison sees what would train."""
    assert run("plugins", "lock", *WATCHED).status == 0
    noted(watched)
    with (watched / "watch.py").open("a") as file:
        file.write("# edited\n")

    ran = run(*QUICK, *WATCHED)

    assert ran.status == 1
    assert "changed  watch.py of watch" in ran.err
    assert noted(watched) == ["0 built", "0 closed"]


def test_plugins_of_the_task_are_not_compared_with_the_lock(run, watched):
    """No lock can know them; they are in the task's file, and only order those that are locked."""
    task = (watched / "tiny.py").read_text()
    hooked = "Task(callbacks=[__import__('watch').Watch()], "
    (watched / "tiny.py").write_text(task.replace("Task(", hooked, 1))
    assert run("plugins", "lock", "--no-plugins").status == 0

    ran = run(*QUICK, "--no-plugins")

    assert ran.status == 0, ran.err
    assert noted(watched) == ["0 built", "0 closed"]


def test_a_plugin_of_the_task_takes_the_place_of_a_locked_one(run, watched):
    """It has the name of the installed one, which isn't built, and nothing else differs."""
    task = (watched / "tiny.py").read_text()
    hooked = "Task(callbacks=[__import__('watch').Watch()], "
    (watched / "tiny.py").write_text(task.replace("Task(", hooked, 1))
    assert run("plugins", "lock", *WATCHED).status == 0
    noted(watched)

    ran = run(*QUICK, *WATCHED)

    assert ran.status == 0, ran.err
    assert noted(watched) == ["0 built", "0 closed"]


@pytest.mark.parametrize("reason", [None, "no images"])
def test_a_resumed_run_without_a_locked_algorithm_continues(run, install, tiny, reason):
    """Installed after the run began, or unsuitable for the task: a resumed run stays without it."""
    (tiny / "pyproject.toml").write_text("[tool.eventloop]\nallow = ['aa-test']\n")
    install("aa-test", ALGORITHM.format(reason=reason))
    assert run("plugins", "lock").status == 0
    without = () if reason else ("--unlocked", "-p", "no:aa-test")
    first = run(*QUICK, "--run-dir", "here", *without)

    ran = run("fit", "tiny.py", "--max-duration", "2ep", "--device", "cpu", "--run-dir", "here",
              "--allow-config-change")  # fmt: skip
    new = run(*QUICK)

    assert first.status == 0, first.err
    assert ran.status == 0, ran.err
    assert "off: aa-test" in ran.out
    assert new.status == 0, new.err


def test_a_task_that_sets_autoload_is_not_refused_by_the_lock(run, install, watched):
    """`plugins lock` has no task to read it from."""
    install("aa-test", ALGORITHM.format(reason=None))
    (watched / "pyproject.toml").write_text("[tool.eventloop]\nallow = ['aa-test']\n")
    task = (watched / "tiny.py").read_text()
    (watched / "tiny.py").write_text(task.replace("settings={", 'settings={"autoload": False, '))
    assert run("plugins", "lock").status == 0

    ran = run(*QUICK)
    by_flag = run(*QUICK, "--no-plugins")

    assert ran.status == 0, ran.err
    assert "off: aa-test" in ran.out
    assert by_flag.status == 1
    assert '-name = "aa-test"' in by_flag.err
