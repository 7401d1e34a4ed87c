"""Files that a command writes: whether they can be written is known before the work."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("option", "path", "message"),
    [
        ("--export", "model.pt", "write `--export model.safetensors`"),
        ("--export", "nowhere/m.safetensors", "make it with `mkdir -p nowhere`"),
        ("--export", "folder.safetensors", "it can't be written: it is a folder"),
        ("--result", "r.txt", "the result is written as .json"),
        ("--result", "nowhere/r.json", "there is no folder 'nowhere'"),
    ],
)
def test_a_file_that_cannot_be_written_stops_nothing_late(option, path, message, run, tiny):
    """It is looked for before anything is trained."""
    (tiny / "folder.safetensors").mkdir()

    ran = run("fit", "tiny.py", "--no-plugins", option, path)

    assert ran.status == 2
    assert f"{option} {path}: " in ran.err
    assert message in ran.err
    assert ran.out == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["fit", "tiny.py", "--export="], "--export '' names no file"),
        (["fit", "tiny.py", "--result="], "write `--result other.json`"),
        (["predict", "tiny.py", "--out="], "--out '' names no file"),
        (["export", "there", ""], "write `other.safetensors`"),
    ],
)
def test_an_empty_path_is_refused(argv, message, run, tiny):
    """It is a shell's variable that isn't set."""
    ran = run(*argv)

    assert ran.status == 2
    assert message in ran.err
