"""Checkpoints that several ranks write, each the slices that it holds: written, read, and found wanting.

The ranks are threads of this process, which hold slices of tensors as any strategy may; those of FSDP are in
its own tests.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from eventloop.checkpoint.checkpoint_export import export_weights, saved_weights_at, weights_at
from eventloop.checkpoint.checkpoint_files import Draft, read_checkpoint
from eventloop.checkpoint.manifest import VERSION_OF_SHARDS, read_manifest, shard_name
from eventloop.checkpoint.part_differences import differences
from eventloop.checkpoint.store import Store
from eventloop.cli.main import main
from eventloop.errors import CheckpointError


@pytest.fixture
def saved(store, slices) -> Path:
    return slices.save(store)


@pytest.mark.parametrize("world_size", [2, 3, 4, 9])
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_are_read_as_the_whole_that_they_were_cut_from(store, slices, same, world_size, dim):
    """Whatever the number of ranks; some hold nothing of a tensor that is small."""
    path = slices.save(store, world_size, dim=dim)

    found = read_checkpoint(path)

    assert same(found.parts["model"], slices.whole["model"])
    assert same(found.parts["optimizers"], slices.whole["optimizers"])
    assert found.names == (
        "model",
        "optimizers",
        *(f"rank{n}" for n in range(world_size)),
        "training",
    )
    assert same(read_checkpoint(path).facts, slices.facts)
    assert store.latest() == (path, [])


def test_each_rank_writes_what_it_holds(saved):
    """And rank 0 what all know; the manifest names each file, and how many shards there are."""
    sizes = {rank: (saved / shard_name("optimizers", rank)).stat().st_size for rank in range(4)}
    manifest = read_manifest(saved)

    assert manifest.shards == {"model": 4, "optimizers": 4}
    assert sorted(manifest.files) == sorted(
        one.name for one in saved.iterdir() if one.name != "manifest.json"
    )
    assert max(sizes.values()) - min(sizes.values()) <= 2 * 5 * 4  # a row of two
    said = json.loads((saved / "manifest.json").read_text())
    assert said["version"] == VERSION_OF_SHARDS


def test_shards_are_safetensors_with_their_places(saved, slices):
    """Any tool opens them; where a slice belongs stands in the header."""
    with safe_open(saved / shard_name("model", 1), "pt") as file:
        places = json.loads(file.metadata()["slices"])
        assert torch.equal(file.get_tensor("wide"), slices.whole["model"]["wide"][2:4])

    assert places == {"wide": [[7, 5], [2, 0]], "short": [[2], [1]]}


def test_whole_tensors_are_written_as_ever(store, slices):
    """A checkpoint without slices has the bytes of version 1."""
    path = store.save(3, slices.whole, slices.facts)

    assert json.loads((path / "manifest.json").read_text())["version"] == 1
    assert "shards" not in (path / "manifest.json").read_text()


def test_slices_of_other_ranks_are_missing_where_one_writes_alone(store, slices):
    """Half a tensor isn't saved as if it were one."""
    with pytest.raises(CheckpointError, match=r"'model\.wide' can't be saved: it is a slice"):
        store.save(3, slices.parts_of(0, 2), slices.facts)


def test_what_fails_on_one_rank_fails_on_all_and_leaves_nothing(store, slices, monkeypatch):
    """The checkpoint before stays, and its folder has no others."""
    before = slices.save(store, batch=2)
    write_files = Draft.write_files

    def failing(self, folder):
        if "00002" in " ".join(self._files):
            raise OSError(28, "No space left on device")
        return write_files(self, folder)

    monkeypatch.setattr(Draft, "write_files", failing)
    with pytest.raises(CheckpointError, match=r"rank 2: .*No space left"):
        slices.save(store)

    assert [one.name for one in store.folder.iterdir()] == [before.name]


def test_a_failure_before_the_folder_is_there_is_told(store, slices):
    """Others don't wait for its name."""
    store.folder.parent.mkdir()
    store.folder.write_text("no folder")

    with pytest.raises(Exception, match="checkpoints"):
        slices.save(store)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(shards={"model": 5, "optimizers": 4}),
        lambda body: body.update(shards={"model": 0}),
        lambda body: body.update(shards=[]),
        lambda body: body.update(shards={"../model": 4}),
        lambda body: body.update(shards={"model": 10**9}),
        lambda body: body.pop("shards"),
    ],
)  # fmt: skip
def test_a_manifest_that_says_other_shards_is_refused(saved, change):
    """One that was sealed anew, too; no more files are looked for than one rank may have written."""
    import hashlib

    path = saved / "manifest.json"
    body = json.loads(path.read_text())
    del body["sha256"]
    change(body)
    rest = json.dumps(body, separators=(",", ":")).removeprefix("{") + "\n"
    digest = hashlib.sha256(rest.encode()).hexdigest()
    path.write_text(f'{{"sha256":"{digest}",\n{rest}')

    with pytest.raises(CheckpointError, match=r"shard"):
        read_checkpoint(saved)


def test_weights_are_put_together_for_an_export(saved, slices, tmp_path):
    """As one file that any tool opens."""
    names, others = export_weights(saved, tmp_path / "model.safetensors")

    assert others == []
    assert list(differences(load_file(tmp_path / "model.safetensors"), slices.whole["model"])) == []
    assert sorted(names) == sorted(slices.whole["model"])


def test_a_damaged_shard_is_not_exported(saved, tmp_path):
    """And no file is left."""
    shard = saved / shard_name("model", 3)
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")

    with pytest.raises(CheckpointError, match=shard.name):
        export_weights(saved, tmp_path / "out" / "model.safetensors")

    assert not list(tmp_path.glob("**/*model.safetensors*.tmp"))


def test_weights_are_read_whole_or_left(saved, slices):
    """For a model of one process, and for one in slices."""
    whole = weights_at(saved)
    left = saved_weights_at(saved)

    assert list(differences(whole, slices.whole["model"])) == []
    assert list(differences(left, slices.whole["model"])) == []
    assert not any(isinstance(one, torch.Tensor) for one in left.values())


def test_the_commands_read_shards(store, slices, capsys):
    """As they read whole tensors; shards and whole tensors of the same values don't differ."""
    shards, others = slices.save(store), Store(store.folder.parent / "other")
    whole = others.save(3, slices.parts_of(0, 1) | {f"rank{n}": {"generator": [n, 7]} for n in range(4)}
                        | slices.whole, slices.facts)  # fmt: skip
    twin = slices.save(
        others,
        3,
        batch=4,
        whole={**slices.whole, "model": {"wide": slices.whole["model"]["wide"] + 1}},
    )

    assert main(["checkpoints", "verify", str(shards)]) == 0
    assert main(["checkpoints", "diff", str(shards), str(whole), "--state"]) == 0
    assert "no difference" in capsys.readouterr().out
    assert main(["checkpoints", "diff", str(shards), str(twin), "--state"]) == 1
    assert "model/wide" in capsys.readouterr().out
    assert main(["checkpoints", str(store.folder), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["verified"] is True
    assert row["bytes"] > sum(shard.stat().st_size for shard in shards.glob("*-0000*"))


@pytest.mark.nightly
@pytest.mark.parametrize("what", ["verify", "diff", "export"])
def test_it_takes_the_memory_of_a_tensor(store, slices, tmp_path, what, memory_kb):
    """Not that of all of them: 24 tensors of 16 MB. What Python and torch load meanwhile is less."""
    whole = {"model": {str(idx): torch.full((2048, 2048), float(idx)) for idx in range(24)}}
    path = slices.save(store, 2, whole=whole)
    commands = {
        "verify": ["checkpoints", "verify", str(path)],
        "diff": ["checkpoints", "diff", str(path), str(path)],
        "export": ["export", str(path), str(tmp_path / "model.safetensors")],
    }

    del whole
    gc.collect()

    assert memory_kb(lambda: main(commands[what])) < 250_000
