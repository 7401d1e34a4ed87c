"""`eventloop checkpoints diff`: what differs between two checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from eventloop.checkpoint.checkpoint_files import read_checkpoint, write_checkpoint

RUN = "runs/a run"
NEWEST, OLDER = (Path(RUN, "checkpoints", name) for name in ("ba00000006", "ba00000003"))
EVIL = "\x1b[2J\r\nx\u202e\udc80[red]"


def as_json(ran, status=0):
    assert ran.status == status, ran.err
    return json.loads(ran.out)


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_checkpoint_equals_itself(run, saved):
    """The negative control of what follows."""
    ran = run("checkpoints", "diff", str(NEWEST), RUN)

    assert ran == (0, f"A  {NEWEST}\nB  {NEWEST}\nno difference\n", "")


def test_what_two_runs_differ_in_is_told_by_subject(run, saved):
    """Configuration, plugins, the lines of the task's file, tensors with the largest difference."""
    text = Path("tiny.py").read_text().replace("generator = torch", "generator  = torch")
    Path("tiny.py").write_text(text)
    run("fit", "tiny.py", "--no-plugins", "--run-dir", "b", "--seed", "3", "--task.lr", "0.2")

    found = as_json(run("checkpoints", "diff", RUN, "b", "--json"), status=1)
    ran = run("checkpoints", "diff", RUN, "b")

    told = {one["path"]: (one["a"], one["b"]) for one in found["configuration"]}
    assert told["settings/seed"] == ("0", "3")
    assert told["optimizers/sgd/groups/0/lr"] == ("'0.1'", "'0.2'")
    assert "task/source" not in told
    assert "-    generator = torch.Generator().manual_seed(0)" in found["task"]
    weights = {one["path"]: one for one in found["state"]}["model/0.weight"]
    first, second = (read_checkpoint(path).parts["model"]["0.weight"]
                     for path in (NEWEST, Path("b/checkpoints/ba00000006")))  # fmt: skip
    assert weights["largest"] == (first.double() - second.double()).abs().max().item()
    for part in ("configuration:\n", "\ntask:\n--- A\n", "\nfacts:\n", "\nstate:\n"):
        assert part in ran.out


def test_what_training_goes_on_from_can_be_compared_alone(run, saved):
    """The same run in another folder differs in what is told of it, and in nothing else."""
    run("fit", "tiny.py", "--no-plugins", "--run-dir", "b")

    told = as_json(run("checkpoints", "diff", RUN, "b", "--json"), status=1)

    assert [one["path"] for one in told["configuration"]] == ["settings/run_dir"]
    assert told["facts"] == told["task"] == told["state"] == []
    assert run("checkpoints", "diff", RUN, "b", "--state").status == 0


def test_what_is_of_one_run_by_its_nature_is_left_out_and_said(run, clean):
    """Ids and wall times hide a real difference otherwise; one that is left out is named."""
    for name, batch in (("a", 3), ("b", 3), ("c", 4)):
        state = {"of_this_run": {"id": EVIL + name}, "batch": batch}
        write_checkpoint(Path(name), {"plugins": {"it": {"version": "1", "state": state}}}, {})

    same, other = (run("checkpoints", "diff", "a", name, "--state") for name in "bc")
    found = as_json(run("checkpoints", "diff", "a", "b", "--json"))

    told = "left out, because it differs between any two runs: plugins/it/state/of_this_run\n"
    assert (same.status, other.status) == (0, 1)
    assert same.out.endswith(f"no difference\n{told}")
    assert "plugins/it/state/batch" in other.out
    assert other.out.endswith(told)
    assert (found["equal"], found["left_out"]) == (True, ["plugins/it/state/of_this_run"])


def test_plugins_are_compared_by_name(run, tiny, install):
    """One more of them moves no other."""
    install("bb-test", version="1.0")
    run("fit", "tiny.py", "--no-plugins", "-p", "bb-test", "--run-dir", "a")
    install("aa-test", version="2.0")
    run("fit", "tiny.py", "--no-plugins", "-p", "bb-test", "-p", "aa-test", "--run-dir", "b")

    told = as_json(run("checkpoints", "diff", "a", "b", "--json"), status=1)["plugins"]

    names = [one["path"].split("/")[:2] for one in told]
    assert ["plugins", "aa-test"] in names
    assert ["plugins", "bb-test"] not in names


def test_parts_that_only_one_has_are_told(run, clean):
    """A second rank, say."""
    write_checkpoint(Path("a"), {"model": {"w": torch.zeros(1)}}, {})
    write_checkpoint(Path("b"), {"model": {"w": torch.zeros(1)}, "rank1": {"n": 1}}, {})

    found = as_json(run("checkpoints", "diff", "a", "b", "--json"), status=1)

    assert found["state"] == [{"path": "rank1", "a": "not there", "b": "there", "largest": None}]


def test_a_damaged_checkpoint_is_not_compared(run, saved):
    """Of a run the newest that verifies stands in, and the one passed over is named."""
    flip_a_bit(NEWEST / "model.safetensors")

    named = run("checkpoints", "diff", str(NEWEST), str(OLDER))
    of_run = run("checkpoints", "diff", RUN, str(OLDER))

    assert (named.status, named.out) == (4, "")
    assert "model.safetensors: its bytes have changed" in named.err
    assert of_run.status == 0
    assert of_run.err.startswith("ba00000006 isn't used: model.safetensors: its bytes")


def test_what_a_run_removes_while_it_is_compared_is_looked_for_again(run, saved, removing):
    """The run has others by then."""
    shutil.copytree(RUN, "other")
    removing(NEWEST, num_openings=9)

    ran = run("checkpoints", "diff", RUN, "other", "--state", "--json")

    assert as_json(ran, 1)["a"] == str(OLDER)
