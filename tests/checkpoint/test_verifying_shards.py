"""Damage to what ranks have saved in slices is found by name, by the rank that reads the file."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from eventloop.checkpoint.checkpoint_files import read_checkpoint
from eventloop.checkpoint.manifest import shard_name
from eventloop.checkpoint.saved_tensors import read_all
from eventloop.checkpoint.verifying import damage_in_shards, damages
from eventloop.errors import CheckpointError
from eventloop.training.tensor_slices import TensorSlice


@pytest.mark.parametrize("kind", ["missing", "cut off", "flipped", "swapped", "of another"])
@pytest.mark.parametrize("part", ["model", "optimizers"])
def test_damage_to_a_shard_is_found_by_name(store, slices, kind, part):
    """By all who read, and by the rank that reads this one of them; the one before is used."""
    other = (
        {**slices.whole, part: read_all({"x": torch.zeros(7, 5)})}
        if kind == "of another"
        else slices.whole
    )
    before, path = slices.save(store, batch=2, whole=other), slices.save(store)
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
    with pytest.raises(CheckpointError, match=part):
        read_checkpoint(path)


def test_slices_that_leave_a_gap_or_overlap_are_refused(store, slices):
    """Digests say that a file is the one that was written, not that ranks wrote what they should."""
    for start in (1, 3):

        def wrong(rank, start=start):
            piece = torch.ones(2 if rank == 0 else 4 - 2, 2)
            return {
                "model": {"w": TensorSlice(piece, (5, 2), (0 if rank == 0 else start, 0))},
                f"rank{rank}": {"a": 1},
            }

        path = slices.save(store, 2, batch=start, parts_of=wrong)

        with pytest.raises(CheckpointError, match="slices don't cover all of 'w'"):
            read_checkpoint(path)
        assert ["cover all of 'w'" in str(one) for one in damages(path)] == [True]


def test_overlapping_slices_are_refused(store, slices):
    """As many entries as the whole has, but one of them twice."""

    def wrong(rank):
        return {"model": {"w": TensorSlice(torch.ones(2, 2), (4, 2), (rank, 0))}, f"rank{rank}": {}}

    path = slices.save(store, 2, parts_of=wrong)

    with pytest.raises(CheckpointError, match="two slices of 'w' overlap"):
        read_checkpoint(path)
    found = [damage_in_shards(path, rank, 2) for rank in range(2)]
    assert found == ["model: two slices of 'w' overlap", ""]


@pytest.mark.nightly
def test_400_flipped_bits_and_100_truncations_are_found(store, slices):
    """Anywhere in all files; by name, and by the rank that reads that file."""
    draw = random.Random(0)
    before, path = slices.save(store, batch=2), slices.save(store)
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
def test_any_two_shards_that_are_swapped_and_any_that_is_missing_are_found(store, slices, part):
    """Of one checkpoint, and of one in the place of another."""
    other = {**slices.whole, part: {"wide": slices.whole["model"]["wide"] + 1}}
    before, path = slices.save(store, batch=2, whole=other), slices.save(store)
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
