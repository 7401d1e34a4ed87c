"""`eventloop checkpoints RUN`: a run's checkpoints in a table."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest

RUN = "runs/a run"
NEWEST, OLDER = (Path(RUN, "checkpoints", name) for name in ("ba00000006", "ba00000003"))


def as_json(ran, status=0):
    assert ran.status == status, ran.err
    return json.loads(ran.out)


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("where", [RUN, f"{RUN}/", f"{RUN}/checkpoints"])
def test_a_run_is_listed_newest_first(where, run, saved):
    """As a run's folder, or the folder in it."""
    lines = run("checkpoints", where).out.splitlines()

    assert lines[0].split()[:6] == ["checkpoint", "batch", "epochs", "saved", "size", "verified"]
    assert [line.split()[:3] for line in lines[1:]] == [["ba00000006", "6", "2"],
                                                        ["ba00000003", "3", "1"]]  # fmt: skip
    assert all(" kB  yes " in line and "test/accuracy 0." in line for line in lines[1:])


def test_json_has_all_of_it(run, saved):
    """A program reads it."""
    newest, older = as_json(run("checkpoints", RUN, "--json"))

    assert (newest["checkpoint"], older["checkpoint"]) == (str(NEWEST), str(OLDER))
    assert (newest["batch"], newest["epoch"], newest["verified"]) == (6, 2, True)
    assert newest["bytes"] == sum(one.stat().st_size for one in NEWEST.iterdir()) - (
        NEWEST / "manifest.json").stat().st_size  # fmt: skip
    assert newest["metrics"].keys() == {
        "test/accuracy",
        "test/loss",
        "valid/accuracy",
        "valid/loss",
    }
    assert newest["saved"].startswith("20")


STOPS = """
from eventloop import hookimpl


class Plugin:
    @hookimpl
    def batch_end(self, state):
        if state.clock.batch == 4:
            state.request_stop("pruned by it at evaluation 1", "pruned")
"""


def test_why_a_run_was_stopped_is_listed(run, tiny, install):
    """A trial that was pruned isn't one that was trained to its end."""
    install("aa-test", STOPS)
    run("fit", "tiny.py", "--no-plugins", "-p", "aa-test", "--run-dir", RUN)

    newest, older = as_json(run("checkpoints", RUN, "--json"))
    lines = run("checkpoints", RUN).out.splitlines()

    assert (newest["batch"], newest["status"]) == (4, "pruned")
    assert newest["stop_reason"] == "pruned by it at evaluation 1"
    assert (older["status"], older["stop_reason"]) == (None, None)
    assert ["pruned by it at evaluation 1" in line for line in lines] == [False, True, False]


def test_plugins_that_took_part_are_listed(run, tiny, install):
    """With their versions."""
    install("aa-test", version="1.5")
    run("fit", "tiny.py", "--no-plugins", "-p", "aa-test", "--run-dir", RUN)

    assert "aa-test 1.5" in run("checkpoints", RUN).out


def test_one_that_does_not_verify_is_marked_with_the_reason(run, saved):
    """Whoever resumes wants to know which one it will be; `--quick` sees sizes alone."""
    flip_a_bit(NEWEST / "model.safetensors")
    (OLDER / "training.json").write_bytes(b"")

    newest, older = as_json(run("checkpoints", RUN, "--json"))
    quick, _ = as_json(run("checkpoints", "list", RUN, "--json", "--quick"))

    assert newest["verified"] is older["verified"] is False
    assert newest["reason"].startswith("model.safetensors: its bytes have changed")
    assert older["reason"].startswith("training.json: it has 0 bytes")
    assert (quick["verified"], quick["reason"]) == (None, "")
    assert "no" in run("checkpoints", RUN).out.splitlines()[1].split()
    assert "not read" in run("checkpoints", RUN, "--quick").out


def test_what_is_left_over_is_not_listed(run, saved):
    """What was being written, removed or replaced is none of the run's checkpoints."""
    folder = NEWEST.parent
    for name in (".tmp-ba00000009-0a1b2c3d-1-0a1b2c3d", ".was-ba00000006-0a1b2c3d-1-0a1b2c3d"):
        shutil.copytree(NEWEST, folder / name)
    (folder / "notes.txt").touch()

    assert len(as_json(run("checkpoints", RUN, "--json"))) == 2


def test_one_that_is_being_replaced_is_listed_where_it_is_the_only_one(run, saved):
    """A kill between two renames leaves this one, and the run goes on from it."""
    NEWEST.rename(NEWEST.parent / f".was-{NEWEST.name}-0a1b2c3d-1-0a1b2c3d")

    newest, _ = as_json(run("checkpoints", RUN, "--json"))

    assert (newest["batch"], newest["verified"]) == (6, True)


def test_a_checkpoint_elsewhere_stands_for_itself(run, saved):
    """One that somebody copied and renamed, or linked to."""
    shutil.copytree(NEWEST, "best")
    Path("link").symlink_to("best")

    for name in ("best", "link"):
        (row,) = as_json(run("checkpoints", name, "--json"))
        assert (row["batch"], row["verified"]) == (6, True)


def test_a_narrow_terminal_gets_a_block_for_each(run, saved, monkeypatch):
    """Names cut into pieces can't be read or pasted."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", "40")

    run("checkpoints", RUN)

    text = terminal.getvalue()
    assert text.startswith("checkpoint  ba00000006\nbatch       6\nepochs      2\nsaved")
    assert max(map(len, text.splitlines())) <= 40


def test_a_wide_terminal_gets_a_table(run, saved, monkeypatch):
    """A line for each checkpoint."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", "160")

    run("checkpoints", RUN)

    assert len(terminal.getvalue().splitlines()) == 3


def test_a_long_wait_is_told_of(run, saved, monkeypatch):
    """Reading hundreds of gigabytes takes minutes, in which nothing else would be said."""
    monkeypatch.setattr("eventloop.cli.checkpoints_list._SLOW_BYTES", 1000)

    assert "`--quick` compares only sizes" in run("checkpoints", RUN).err
    assert run("checkpoints", RUN, "--quick").err == ""
