"""`eventloop export`: the weights of a checkpoint, alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eventloop.checkpoint.checkpoint_files import read_checkpoint, write_checkpoint
from eventloop.files import disk

CHECKPOINT = Path("runs/a run/checkpoints/ba00000006")


@pytest.fixture
def saved(run, tiny):
    """A run with two checkpoints."""
    assert run("fit", "tiny.py", "--no-plugins", "--run-dir", "runs/a run").status == 0
    return tiny


@pytest.mark.parametrize("source", [str(CHECKPOINT), "runs/a run", "runs/a run/checkpoints"])
def test_the_weights_are_those_of_the_checkpoint(source, run, saved):
    """A run stands for its newest checkpoint; the file is one that any tool reads."""
    ran = run("export", source, "my model.safetensors")

    expected = read_checkpoint(CHECKPOINT).parts["model"]
    actual = load_file("my model.safetensors")
    assert actual.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in actual.items())
    assert ran.out == f"my model.safetensors: 4 tensors, 420 bytes, of {CHECKPOINT}\n"


def test_what_is_exported_is_evaluated_like_the_run(run, saved):
    """It needs the task for that, and nothing of the run; the checkpoint itself does as well."""
    run("export", "runs/a run", "m.safetensors")
    shutil.copytree(CHECKPOINT, "best")

    of_file, of_folder, of_run = (
        run("eval", "tiny.py", "--no-plugins", "--json", "--weights", weights).out
        for weights in ("m.safetensors", "best", "runs/a run")
    )

    assert f"{read_checkpoint(CHECKPOINT).facts['metrics']['test/accuracy']}" in of_file
    assert of_file == of_folder == of_run


def test_what_is_no_tensor_is_left_out_and_named(run, clean):
    """A module may keep something else in its state."""
    write_checkpoint(Path("a"), {"model": {"w": torch.ones(2), "w_extra": {"n": 3}}}, {})

    ran = run("export", "a", "m.safetensors")

    assert list(load_file("m.safetensors")) == ["w"]
    assert ran.out.endswith("left out, because it is not a tensor: w_extra.n\n")


def test_damaged_weights_are_not_exported(run, saved):
    """What was there stays; nothing half written is left."""
    Path("m.safetensors").write_bytes(b"before")
    data = bytearray((CHECKPOINT / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (CHECKPOINT / "model.safetensors").write_bytes(data)

    ran = run("export", str(CHECKPOINT), "m.safetensors")

    assert ran.status == 4
    assert "model.safetensors: its bytes have changed since it was written" in ran.err
    assert Path("m.safetensors").read_bytes() == b"before"
    assert not list(Path().glob(".m*"))


def test_a_full_disk_leaves_no_file(run, saved, monkeypatch):
    """And says that it was the disk."""

    def fail(descriptor, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "write", fail)

    ran = run("export", "runs/a run", "m.safetensors")

    assert ran.status == 1
    assert "can't be written to 'm.safetensors': No space left on device" in ran.err
    assert not list(Path().glob("*m.safetensors*"))


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "`eventloop export` needs CHECKPOINT and FILE.safetensors"),
        (["runs/a run"], "`eventloop export` needs FILE.safetensors"),
        (["runs/a run", "m.pt"], "write `m.safetensors`"),
        (["runs/a run", "a b/m.safetensors"], "mkdir -p 'a b'"),
        (["runs/a rum", "m.safetensors"], "the closest is 'a run'"),
        (["runs/a run", "m.safetensors", "more"], "'more' isn't expected here"),
    ],
)
def test_what_was_typed_wrong_is_told(argv, told, run, saved):
    """Nothing is written then."""
    ran = run("export", *argv)

    assert ran.status == 2
    assert told in ran.err
    assert not list(Path().glob("*.safetensors"))


def test_a_checkpoint_without_weights_is_told_of(run, clean):
    """Somebody may have written one by hand."""
    write_checkpoint(Path("a"), {"training": {"n": 1}}, {})

    ran = run("export", "a", "m.safetensors")

    assert ran.status == 4
    assert "no tensors in a part 'model', only training" in ran.err


def test_the_best_checkpoint_of_a_run_is_exported_where_that_is_asked_for(run, tiny):
    """`--best` means the same in every command."""
    best = ("--checkpoint-best", "max test/loss")
    fit = run(
        "fit",
        "tiny.py",
        "--no-plugins",
        "--run-dir",
        "there",
        *best,
        "--export",
        "last.safetensors",
    )

    ran = run("export", "there", "best.safetensors", "--best")

    assert ran.out.endswith("of there/checkpoints/ba00000003\n")
    assert fit.out.splitlines()[-1] == (
        "exported: last.safetensors, the weights of the last step; "
        "`eventloop export there best.safetensors --best` writes the best, and so does --export-best"
    )


def test_the_last_line_of_fit_names_the_plugin_whose_weights_were_exported(run, tiny):
    """An average and the last weights are files alike."""
    (tiny / "mean.py").write_text(
        "from eventloop import hookimpl\n"
        "class Mean:\n"
        "    role = 'algorithm'\n"
        "    @hookimpl(wrapper=True)\n"
        "    def export(self, state, path):\n"
        "        return (yield)\n"
    )

    ran = run("fit", "tiny.py", "--no-plugins", "-p", "mean.py:Mean", "--export", "m.safetensors")

    assert ran.out.splitlines()[-1] == "exported: m.safetensors, the weights of mean"
