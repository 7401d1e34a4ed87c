"""What a command has found goes on to the trainer."""

from __future__ import annotations

import sys

import pytest

from eventloop.plugin.metadata import discover
from eventloop.plugin.select import select

HEARS = "from eventloop import hookimpl\nclass Plugin:\n    @hookimpl\n    def close(self): pass\n"


@pytest.mark.parametrize("is_locked", [False, True])
def test_a_command_discovers_selects_and_loads_once(run, tiny, install, is_locked):
    """What it has found goes on to the trainer; a file that is loaded again would run again."""
    install("aa-test")
    (tiny / "loud.py").write_text(f"print('loaded')\n{HEARS}")
    asked, before = [], ""
    if is_locked:  # the same process, where a file that was loaded isn't loaded again
        (tiny / "pyproject.toml").touch()
        before = run("plugins", "lock", "-p", "./loud.py:Plugin").err

    def note(frame, event, _):
        if event == "call" and frame.f_code in (discover.__code__, select.__code__):
            asked.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        ran = run("fit", "tiny.py", "-p", "./loud.py:Plugin", "--max-duration", "1ba")
    finally:
        sys.setprofile(None)

    assert ran.status == 0, ran.err
    assert asked == ["discover", "select"]
    assert (before + ran.out + ran.err).count("loaded") == 1
