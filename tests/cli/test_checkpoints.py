"""`eventloop checkpoints`: what its subcommands share."""

from __future__ import annotations

from pathlib import Path

import pytest

RUN = "runs/a run"
NEWEST, OLDER = (Path(RUN, "checkpoints", name) for name in ("ba00000006", "ba00000003"))


def test_a_folder_without_checkpoints_is_told_of(run, saved):
    """With the runs in it, as whoever leaves out the last name means one of these."""
    Path("empty").mkdir()

    assert run("checkpoints", "empty") == (0, "there are no checkpoints in 'empty'\n", "")
    assert run("checkpoints", "empty", "--json").out == "[]\n"
    assert "in 'runs' itself, but it has the runs 'a run'" in run("checkpoints", "runs").out
    for rest in (["verify", "empty"], ["diff", "empty", RUN]):
        ran = run("checkpoints", *rest)
        assert ran.status == 2
        assert "there are no checkpoints in 'empty'" in ran.err


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["runs/a rum"], "no folder 'runs/a rum'; the closest is 'a run'"),
        (["nowhere/at/all"], "no folder 'nowhere/at/all'"),
        ([str(NEWEST / "manifest.json")], f"name the folder: '{NEWEST}'"),
        ([], "`eventloop checkpoints list` needs RUN"),
        (["verify"], "`eventloop checkpoints verify` needs PATH"),
        (["diff", RUN], "`eventloop checkpoints diff` needs B"),
        (["verfy", RUN], "no subcommand 'verfy'; the closest is 'verify'"),
        ([RUN, "--qiuck=1"], "no option '--qiuck'; the closest is 'quick'"),
        ([RUN, "-p", "mixup"], "takes no -p"),
        ([RUN, "runs/b"], "'runs/b' isn't expected here"),
    ],
)
def test_what_was_typed_wrong_is_told(argv, told, run, saved):
    """A wrong path is the most common mistake."""
    ran = run("checkpoints", *argv)

    assert ran.status == 2
    assert ran.err.startswith("UsageError: ")
    assert told in ran.err


@pytest.mark.parametrize("rest", [["--help"], ["list", "-h"], ["verify", "--help"],
                                  ["diff", "--help"]])  # fmt: skip
def test_help_says_how_it_is_written(rest, run, clean):
    """Plugins and settings don't matter here, and aren't mentioned."""
    ran = run("checkpoints", *rest)

    assert ran.status == 0
    assert ran.out.startswith("usage: eventloop checkpoints ")
    assert "--config" not in ran.out


def test_torch_and_the_task_stay_unimported(run_python, saved):
    """Listing and verifying take as long as Python and the disk do; the task may be gone."""
    Path("tiny.py").unlink()
    code = (
        "import sys; from eventloop.cli import main\n"
        f"main(['checkpoints', {RUN!r}]); main(['checkpoints', 'verify', {RUN!r}])\n"
        f"main(['export', {RUN!r}, 'model.safetensors'])\n"
        "print('torch' in sys.modules)"
    )

    done = run_python(code)

    assert done.stdout.endswith("False\n"), done.stderr
    assert Path("model.safetensors").exists()
