"""Checkpoints that several ranks write, each the slices that it holds: written, read, and found wanting.

The ranks are threads of this process, which hold slices of tensors as any strategy may; those of FSDP are in
its own tests.
"""

from __future__ import annotations

import gc
import itertools
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from eventloop.checkpoint.checkpoint_files import Draft, read_checkpoint, verify
from eventloop.checkpoint.manifest import VERSION_OF_SHARDS, read_manifest, shard_name
from eventloop.checkpoint.saved_tensors import read_all
from eventloop.checkpoint.store import Store
from eventloop.checkpoint.verifying import damage_in_shards, damages
from eventloop.checkpoint.weight_files import export_weights, saved_weights_at, weights_at
from eventloop.cli.main import main
from eventloop.errors import CheckpointError
from eventloop.training.tensor_slices import TensorSlice
from eventloop_checkpoints.differences import differences
from eventloop_testing.ranks import crew_of_threads

FACTS = {"moment": {"batch": 3}}
WHOLE = {
    "model": {
        "wide": torch.arange(35.0).view(7, 5),
        "buffer": torch.tensor([1, 2, 3]),
        "short": torch.arange(2.0).bfloat16(),
    },
    "optimizers": {
        "adam": {"state": {0: {"step": torch.tensor(4.0), "mean": -torch.arange(35.0).view(7, 5)}}}
    },
}


def cut(nest, rank, world_size, dim=0):
    """Returns what a rank holds: even shares of what has two dimensions, along one of them."""
    if isinstance(nest, dict):
        return {key: cut(one, rank, world_size, dim) for key, one in nest.items()}
    if nest.ndim < 2 and nest.dtype != torch.bfloat16:
        return nest
    along = min(dim, nest.ndim - 1)
    size = -(-nest.shape[along] // world_size)
    start = min(rank * size, nest.shape[along])
    part = nest.narrow(along, start, min(size, nest.shape[along] - start))
    offsets = [0] * nest.ndim
    offsets[along] = start
    return TensorSlice(part, tuple(nest.shape), tuple(offsets))


def parts_of(rank, world_size, dim=0, whole=WHOLE):
    parts = {name: cut(part, rank, world_size, dim) for name, part in whole.items()}
    own = {f"rank{rank}": {"generator": [rank, 7]}}
    return parts | own | ({"training": {"batches": 3}} if rank == 0 else {})


def save(store, world_size=4, batch=3, dim=0, whole=WHOLE):
    """Saves as many ranks do, at once; gives rank 0's place, or raises what it raised."""
    crew = crew_of_threads(world_size)

    def save_one(rank):
        parts = parts_of(rank, world_size, dim, whole)
        return store.save(batch, parts, FACTS, crew[rank])

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(save_one, rank) for rank in range(world_size)]
    return next(one.result() for one in futures)


@pytest.fixture
def saved(store) -> Path:
    return save(store)


@pytest.mark.parametrize("world_size", [2, 3, 4, 9])
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_are_read_as_the_whole_that_they_were_cut_from(store, same, world_size, dim):
    """Whatever the number of ranks; some hold nothing of a tensor that is small."""
    path = save(store, world_size, dim=dim)

    found = read_checkpoint(path)

    assert same(found.parts["model"], WHOLE["model"])
    assert same(found.parts["optimizers"], WHOLE["optimizers"])
    assert found.names == (
        "model",
        "optimizers",
        *(f"rank{n}" for n in range(world_size)),
        "training",
    )
    assert same(verify(path), FACTS)
    assert store.latest() == (path, [])


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("written_by", "dim"), [(4, 0), (4, 1), (None, 0)])
def test_any_number_of_ranks_reads_its_slices(store, world_size, written_by, dim):
    """Of shards, of shards along another dimension, and of whole tensors."""
    path = save(store, written_by, dim=dim) if written_by else store.save(3, WHOLE, FACTS)

    for rank in range(world_size):
        left = read_checkpoint(
            path, ["model"], leaving=["model"], nearest=(rank + 0.5) / world_size
        ).parts
        for name in ("wide", "short"):
            wanted = cut(WHOLE["model"][name], rank, world_size)
            if isinstance(wanted, TensorSlice):
                part = left["model"][name].read_slice(wanted.offsets, wanted.tensor.shape)
                assert torch.equal(part, wanted.tensor)
        assert torch.equal(read_all(left)["model"]["wide"], WHOLE["model"]["wide"])


def test_a_rank_opens_no_more_files_than_hold_its_share(store, monkeypatch):
    """Of a thousand files each rank reads those of its neighbours alone."""
    path = save(store, 7)
    for rank in range(7):
        (path / shard_name("optimizers", rank)).unlink()
    left = read_checkpoint(path, ["model"], leaving=["model"], nearest=(5 + 0.5) / 7).parts["model"]
    for rank in range(7):
        if rank != 5:
            (path / shard_name("model", rank)).unlink()

    assert left["wide"].read_slice((5, 0), (1, 5)).tolist() == [WHOLE["model"]["wide"][5].tolist()]


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


def test_shards_are_safetensors_with_their_places(saved):
    """Any tool opens them; where a slice belongs stands in the header."""
    with safe_open(saved / shard_name("model", 1), "pt") as file:
        places = json.loads(file.metadata()["slices"])
        assert torch.equal(file.get_tensor("wide"), WHOLE["model"]["wide"][2:4])

    assert places == {"wide": [[7, 5], [2, 0]], "short": [[2], [1]]}


def test_whole_tensors_are_written_as_ever(store):
    """A checkpoint without slices has the bytes of version 1."""
    path = store.save(3, WHOLE, FACTS)

    assert json.loads((path / "manifest.json").read_text())["version"] == 1
    assert "shards" not in (path / "manifest.json").read_text()


def test_slices_of_other_ranks_are_missing_where_one_writes_alone(store):
    """Half a tensor isn't saved as if it were one."""
    with pytest.raises(CheckpointError, match=r"'model\.wide' can't be saved: it is a slice"):
        store.save(3, parts_of(0, 2), FACTS)


def test_what_fails_on_one_rank_fails_on_all_and_leaves_nothing(store, monkeypatch):
    """The checkpoint before stays, and its folder has no others."""
    before = save(store, batch=2)
    write_files = Draft.write_files

    def failing(self, folder):
        if "00002" in " ".join(self._files):
            raise OSError(28, "No space left on device")
        return write_files(self, folder)

    monkeypatch.setattr(Draft, "write_files", failing)
    with pytest.raises(CheckpointError, match=r"rank 2: .*No space left"):
        save(store)

    assert [one.name for one in store.folder.iterdir()] == [before.name]


def test_a_failure_before_the_folder_is_there_is_told(store):
    """Others don't wait for its name."""
    store.folder.parent.mkdir()
    store.folder.write_text("no folder")

    with pytest.raises(Exception, match="checkpoints"):
        save(store)


@pytest.mark.parametrize("kind", ["missing", "cut off", "flipped", "swapped", "of another"])
@pytest.mark.parametrize("part", ["model", "optimizers"])
def test_damage_to_a_shard_is_found_by_name(store, kind, part):
    """By all who read, and by the rank that reads this one of them; the one before is used."""
    other = {**WHOLE, part: read_all({"x": torch.zeros(7, 5)})} if kind == "of another" else WHOLE
    before, path = save(store, batch=2, whole=other), save(store)
    shard = path / shard_name(part, 2)
    data = shard.read_bytes()
    if kind == "missing":
        shard.unlink()
    elif kind == "cut off":
        shard.write_bytes(data[:-3])
    elif kind == "flipped":
        shard.write_bytes(data[:-9] + bytes([data[-9] ^ 4]) + data[-8:])
    elif kind == "swapped":
        twin = path / shard_name(part, 0)
        shard.write_bytes(twin.read_bytes())
        twin.write_bytes(data)
    else:
        shard.write_bytes((before / shard.name).read_bytes())

    latest, refused = store.latest()
    assert latest == before
    assert [one for one, _ in refused] == [path]
    assert any(shard.name in str(one) for one in damages(path))
    assert shard.name in damage_in_shards(path, 2, 4)
    if kind != "swapped":
        assert damage_in_shards(path, 1, 4) == ""
    for function in (read_checkpoint, verify):
        with pytest.raises(CheckpointError, match=part):
            function(path)


def test_slices_that_leave_a_gap_or_overlap_are_refused(store, monkeypatch):
    """Digests say that a file is the one that was written, not that ranks wrote what they should."""
    for start in (1, 3):

        def wrong(rank, world_size, dim=0, whole=WHOLE, start=start):
            piece = torch.ones(2 if rank == 0 else 4 - 2, 2)
            return {
                "model": {"w": TensorSlice(piece, (5, 2), (0 if rank == 0 else start, 0))},
                f"rank{rank}": {"a": 1},
            }

        monkeypatch.setitem(save.__globals__, "parts_of", wrong)
        path = save(store, 2, batch=start)

        with pytest.raises(CheckpointError, match="slices don't make up all of 'w'"):
            read_checkpoint(path)
        assert ["make up all of 'w'" in str(one) for one in damages(path)] == [True]


def test_overlapping_slices_are_refused(store, monkeypatch):
    """As many entries as the whole has, but one of them twice."""

    def wrong(rank, world_size, dim=0, whole=WHOLE):
        return {"model": {"w": TensorSlice(torch.ones(2, 2), (4, 2), (rank, 0))}, f"rank{rank}": {}}

    monkeypatch.setitem(save.__globals__, "parts_of", wrong)
    path = save(store, 2)

    with pytest.raises(CheckpointError, match="two slices of 'w' overlap"):
        verify(path)
    found = [damage_in_shards(path, rank, 2) for rank in range(2)]
    assert found == ["model: two slices of 'w' overlap", ""]


def test_a_rank_reads_no_slice_from_slices_that_overlap(store, monkeypatch):
    """What none of them holds would be memory that was never written."""

    def wrong(rank, world_size, dim=0, whole=WHOLE):
        return {"model": {"w": TensorSlice(torch.ones(2, 2), (4, 2), (rank, 0))}, f"rank{rank}": {}}

    monkeypatch.setitem(save.__globals__, "parts_of", wrong)
    left = read_checkpoint(save(store, 2), ["model"], leaving=["model"]).parts["model"]["w"]

    for offset, rows, problem in ((0, 4, "overlap"), (1, 3, "overlap"), (2, 2, "in none")):
        with pytest.raises(CheckpointError, match=problem):
            left.read_slice((offset, 0), (rows, 2))


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


def test_weights_are_put_together_for_an_export(saved, tmp_path):
    """As one file that any tool opens."""
    names, others = export_weights(saved, tmp_path / "model.safetensors")

    assert others == []
    assert list(differences(load_file(tmp_path / "model.safetensors"), WHOLE["model"])) == []
    assert sorted(names) == sorted(WHOLE["model"])


def test_a_damaged_shard_is_not_exported(saved, tmp_path):
    """And no file is left."""
    shard = saved / shard_name("model", 3)
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")

    with pytest.raises(CheckpointError, match=shard.name):
        export_weights(saved, tmp_path / "out" / "model.safetensors")

    assert not list(tmp_path.glob("**/*model.safetensors*.tmp"))


def test_weights_are_read_whole_or_left(saved):
    """For a model of one process, and for one in slices."""
    whole = weights_at(saved)
    left = saved_weights_at(saved)

    assert list(differences(whole, WHOLE["model"])) == []
    assert list(differences(left, WHOLE["model"])) == []
    assert not any(isinstance(one, torch.Tensor) for one in left.values())


def test_the_commands_read_shards(store, capsys):
    """As they read whole tensors; shards and whole tensors of the same values don't differ."""
    shards, others = save(store), Store(store.folder.parent / "other")
    whole = others.save(3, parts_of(0, 1) | {f"rank{n}": {"generator": [n, 7]} for n in range(4)}
                        | WHOLE, FACTS)  # fmt: skip
    twin = save(others, 3, batch=4, whole={**WHOLE, "model": {"wide": WHOLE["model"]["wide"] + 1}})

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
def test_it_takes_the_memory_of_a_tensor(store, tmp_path, what, memory_kb):
    """Not that of all of them: 24 tensors of 16 MB. What Python and torch load meanwhile is less."""
    whole = {"model": {str(idx): torch.full((2048, 2048), float(idx)) for idx in range(24)}}
    path = save(store, 2, whole=whole)
    commands = {
        "verify": ["checkpoints", "verify", str(path)],
        "diff": ["checkpoints", "diff", str(path), str(path)],
        "export": ["export", str(path), str(tmp_path / "model.safetensors")],
    }

    del whole
    gc.collect()

    assert memory_kb(lambda: main(commands[what])) < 250_000


@pytest.mark.nightly
def test_400_flipped_bits_and_100_truncations_are_found(store):
    """Anywhere in all files; by name, and by the rank that reads that file."""
    draw = random.Random(0)
    before, path = save(store, batch=2), save(store)
    files = sorted(path.iterdir())
    whole = {one: one.read_bytes() for one in files}
    sizes = [len(whole[one]) for one in files]

    for num in range(500):
        (file,) = draw.choices(files, sizes)
        data = bytearray(whole[file])
        if num < 400:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        else:
            del data[draw.randrange(len(data)) :]
        file.write_bytes(data)

        latest, ((refused, reason),) = store.latest()
        assert (latest, refused) == (before, path)
        assert file.name in reason
        found = [damage_in_shards(path, rank, 3) for rank in range(3)]
        assert any(file.name in one for one in found) or "-0000" not in file.name
        file.write_bytes(whole[file])

    assert store.latest() == (path, [])


@pytest.mark.parametrize("part", ["model", "optimizers"])
def test_any_two_shards_that_are_swapped_and_any_that_is_missing_are_found(store, part):
    """Of one checkpoint, and of one in the place of another."""
    other = {**WHOLE, part: {"wide": WHOLE["model"]["wide"] + 1}}
    before, path = save(store, batch=2, whole=other), save(store)
    shards = [path / shard_name(part, rank) for rank in range(4)]
    whole = {one: one.read_bytes() for one in shards}

    for first, second in itertools.combinations(shards, 2):
        first.write_bytes(whole[second])
        second.write_bytes(whole[first])
        assert store.latest()[0] == before
        for one in (first, second):
            one.write_bytes(whole[one])
    for one in shards:
        one.unlink()
        assert store.latest()[0] == before
        one.write_bytes((before / one.name).read_bytes())
        assert store.latest()[0] == before
        one.write_bytes(whole[one])

    assert store.latest() == (path, [])
