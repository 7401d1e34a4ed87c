"""What a command does before its task's file is read."""

from __future__ import annotations

import pytest

from eventloop import EventloopError
from eventloop.cli.arguments import read_arguments
from eventloop.cli.fit import COMMAND
from eventloop.cli.job import prepare

STARTS = """
from pathlib import Path

class Plugin:
    off_until_named = {sleeps}

    def __init__(self, path=""):
        raise AssertionError("it is built later")

    @staticmethod
    def start_early():
        Path("started").touch()
"""
LATE = "from pathlib import Path\nraise RuntimeError(Path('started').exists())"


@pytest.fixture
def begins(run, tiny, install):
    """Runs a command on a file that says whether the plugin had started something by then."""

    def begins(command, *flags, sleeps=False):
        install("starts", STARTS.format(sleeps=sleeps))
        (tiny / "late.py").write_text(LATE)
        written = run(command, "late.py", *flags).err
        assert "RuntimeError: " in written
        return "RuntimeError: True" in written

    return begins


@pytest.mark.parametrize("flags", [(), ("--starts.path", "a"), ("-p", "starts", "--no-plugins")])
def test_a_plugin_starts_early_what_training_will_need(begins, flags):
    """Before the task's file is imported, which may take as long."""
    assert begins("fit", *flags)


@pytest.mark.parametrize(
    ("command", "flags"),
    [("fit", ["--no-plugins"]), ("fit", ["-p", "no:starts"]), ("fit", ["--dry-run"]),
     ("fit", ["--check"]), ("fit", ["--print-config"]), ("predict", [])],
)  # fmt: skip
def test_nothing_is_started_early_that_no_training_needs(begins, command, flags):
    """It would only take time."""
    assert not begins(command, *flags)


def test_a_plugin_that_sleeps_starts_nothing_early(begins):
    """It takes no part."""
    assert not begins("fit", sleeps=True)


@pytest.mark.parametrize(("rank", "starts"), [("0", True), ("1", False)])
def test_rank_0_alone_starts_something_early(tiny, install, monkeypatch, rank, starts):
    """What a run has once is its own."""
    install("starts", STARTS.format(sleeps=False))
    for name, value in {"RANK": rank, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)

    prepare(read_arguments(["tiny.py"], COMMAND), COMMAND, trains=True)

    assert (tiny / "started").exists() == starts


def test_what_fails_to_start_early_names_its_plugin(tiny, install):
    """With the way out."""
    install("starts", STARTS.format(sleeps=False).replace("Path(", "undefined("))

    with pytest.raises(EventloopError, match="NameError: name 'undefined'") as raised:
        prepare(read_arguments(["tiny.py"], COMMAND), COMMAND, trains=True)

    assert "plugin  starts (eventloop-starts 1.0)" in str(raised.value)
    assert "switch the plugin off" in str(raised.value)
