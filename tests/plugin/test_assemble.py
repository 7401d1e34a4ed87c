"""What a command has found goes on to the trainer."""

from __future__ import annotations

import sys

import pytest

from eventloop.plugin.choose import choose
from eventloop.plugin.discover import discover

HEARS = "from eventloop import hookimpl\nclass Plugin:\n    @hookimpl\n    def close(self): pass\n"
CHOSEN = ("--no-plugins", "-p", "aa-test", "-p", "./loud.py:Plugin")


@pytest.mark.parametrize("is_locked", [False, True])
def test_a_command_discovers_chooses_and_loads_once(run, tiny, install, is_locked):
    """What it has found goes on to the trainer; a file that is loaded again would run again."""
    install("aa-test")
    (tiny / "loud.py").write_text(f"print('loaded')\n{HEARS}")
    asked, before = [], ""
    if is_locked:  # the same process, where a file that was loaded isn't loaded again
        (tiny / "pyproject.toml").touch()
        before = run("plugins", "lock", *CHOSEN).err

    def note(frame, event, _):
        if event == "call" and frame.f_code in (discover.__code__, choose.__code__):
            asked.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        ran = run("fit", "tiny.py", *CHOSEN, "--max-duration", "1ba")
    finally:
        sys.setprofile(None)

    assert ran.status == 0, ran.err
    assert asked == ["discover", "choose"]
    assert (before + ran.out + ran.err).count("loaded") == 1
