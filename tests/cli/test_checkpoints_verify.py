"""`eventloop checkpoints verify`: which files aren't what was written."""

from __future__ import annotations

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


def test_a_verified_run_has_exit_status_0(run, saved):
    """One line for each."""
    ran = run("checkpoints", "verify", RUN)

    assert ran == (0, f"{NEWEST}: verified\n{OLDER}: verified\n2 of 2 checkpoints verified\n", "")


def test_each_wrong_file_is_named_and_the_exit_status_is_4(run, saved):
    """Not only the first, so that one look is enough; scripts tell it from wrong usage."""
    flip_a_bit(NEWEST / "model.safetensors")
    (NEWEST / "rank0.json").unlink()
    flip_a_bit(NEWEST / "training.json")

    (row,) = as_json(run("checkpoints", "verify", str(NEWEST), "--json"), status=4)
    ran = run("checkpoints", "verify", RUN)

    assert row["verified"] is False
    assert [one.partition(": ")[0] for one in row["problems"]] == [
        "model.safetensors",
        "rank0.json",
        "training.json",
    ]
    assert ran.status == 4
    assert f"{NEWEST}: doesn't verify\n  model.safetensors: its bytes" in ran.out
    assert ran.out.endswith("1 of 2 checkpoints verified\n")


@pytest.mark.parametrize("break_it", [
    lambda: (NEWEST / "manifest.json").unlink(),
    lambda: flip_a_bit(NEWEST / "manifest.json"),
    lambda: NEWEST.rename(NEWEST.with_name("ba00000007")),
    lambda: (shutil.rmtree(NEWEST), NEWEST.symlink_to(OLDER.absolute())),
    lambda: (shutil.rmtree(NEWEST), NEWEST.touch()),
])  # fmt: skip
def test_a_broken_folder_is_found(break_it, run, saved):
    """No manifest, another one, another step's, a link, a file."""
    break_it()

    assert run("checkpoints", "verify", RUN).status == 4
    assert as_json(run("checkpoints", RUN, "--json"))[0]["verified"] is False


def test_a_run_of_which_none_verifies_has_exit_status_4(run, saved):
    """With the reason for each."""
    for path in (NEWEST, OLDER):
        flip_a_bit(path / "model.safetensors")

    ran = run("checkpoints", "diff", RUN, RUN)

    assert ran.status == 4
    assert ran.err.startswith(
        f"CheckpointError: none of the 2 checkpoints in '{RUN}' can be used\n"
    )
    assert "ba00000003: model.safetensors" in ran.err


@pytest.mark.parametrize("command", ["verify", "list"])
@pytest.mark.parametrize("gone", [NEWEST, OLDER])
def test_what_a_run_removes_meanwhile_is_not_damaged(command, gone, run, saved, removing):
    """A cron job that verifies runs under way would report a loss several times a day."""
    removing(gone)

    rows = as_json(run("checkpoints", command, RUN, "--json"))

    left = OLDER if gone == NEWEST else NEWEST
    assert [(row["checkpoint"], row["verified"]) for row in rows] == [(str(left), True)]


def test_a_checkpoint_that_is_named_and_removed_meanwhile_is_not_there(run, saved, removing):
    """It can't be looked for again, but isn't damaged."""
    removing(NEWEST)

    ran = run("checkpoints", "verify", str(NEWEST))

    assert (ran.status, "ba00000006" in ran.err) == (2, True)
