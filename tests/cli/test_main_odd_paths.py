"""Paths that no system takes: an error that says so, whichever command they are given to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eventloop import SettingError, Trainer
from eventloop.cli.main import main
from eventloop.cli.printing import write_lines, write_table
from eventloop.distributed.process_ends import exit_status
from eventloop.errors import EventloopError
from eventloop_testing import tiny_task

LONG = "a" * 5_000


@pytest.mark.parametrize(
    "argv",
    [
        ["fit", LONG],
        ["checkpoints", LONG],
        ["checkpoints", "verify", LONG],
        ["checkpoints", "diff", LONG, LONG],
        ["export", LONG, "out.safetensors"],
    ],
    ids=lambda argv: " ".join(argv)[:20],
)
def test_a_path_that_is_too_long_is_an_error(argv, clean, capsys):
    """Not a traceback of where the system was asked."""
    assert main(argv) == 2

    err = capsys.readouterr().err
    assert err.startswith("UsageError: a path is too long: ")
    assert "Traceback" not in err
    assert len(err) < 500


@pytest.mark.parametrize("name", ["x\nPluginError: fake", "x\x1b[31m", "x\r\ny"])
def test_a_path_is_printed_on_one_line(name, clean, capsys):
    """What follows an end of a line would look like a message of ours."""
    folder = clean / name
    folder.mkdir()

    for argv in (["fit", str(folder)], ["checkpoints", str(folder)]):
        main(argv)
        assert not any(line.startswith(("PluginError", "y")) for line in _lines(capsys))
    write_lines([f"run dir: {folder}"])
    write_table(["run"], [[str(folder)]])
    assert not any(line.startswith(("PluginError", "y")) for line in _lines(capsys))


def test_a_path_in_a_fact_is_on_one_line():
    """Facts of errors are a line each."""
    assert "\n" not in str(EventloopError("no", folder=Path("x\ny"))).partition("\n")[2]


def _lines(capsys) -> list[str]:
    found = capsys.readouterr()
    assert "\x1b" not in found.out + found.err
    return (found.out + found.err).split("\n")


def test_a_quoted_tilde_is_the_home_directory(run, tiny, monkeypatch):
    """A shell doesn't expand it between quotes, and a folder `~` is easily removed with all of home."""
    monkeypatch.setenv("HOME", str(tiny / "home"))
    (tiny / "home").mkdir()

    by_flag = run("fit", "tiny.py", "--no-plugins", "--run-dir", "~/flag")
    (tiny / "pyproject.toml").write_text('[tool.eventloop]\nrun_dir = "~/file"\n')
    by_file = run("fit", "tiny.py", "--no-plugins")

    assert (by_flag.status, by_file.status) == (0, 0)
    assert run("checkpoints", "list", "~/flag").status == 0
    assert (tiny / "home" / "file" / "checkpoints").is_dir()
    assert not (tiny / "~").exists()


@pytest.mark.parametrize("setting", ["run_dir", "resume"])
@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_that_is_not_utf8_is_refused(setting, kind):
    """The run's files, which are JSON, couldn't say where they are."""
    path = kind(os.fsdecode(b"runs/\xff"))

    with pytest.raises(SettingError, match=r"'runs/\\udcff' isn't UTF-8") as refused:
        Trainer(tiny_task(), max_duration="1ba", **{setting: path})

    str(refused.value).encode()
    assert exit_status(refused.value) == 2


@pytest.mark.parametrize(
    "argv", [("fit", "tiny.py"), ("plugins",), ("checkpoints", "list", "run"), ("no-such",)]
)
def test_a_current_folder_that_was_deleted_is_named(run, tiny, monkeypatch, argv):
    """Whatever is looked for from there isn't missing: there is no place to look."""
    (tiny / "gone").mkdir()
    monkeypatch.chdir(tiny / "gone")
    (tiny / "gone").rmdir()

    ran = run(*argv)

    assert ran.status == 2
    assert ran.err.startswith("UsageError: the current folder was deleted")
    assert run("--version").status == 0
