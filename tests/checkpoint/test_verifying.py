"""Damage of every kind is found before anything is used, named, and the checkpoint before is taken."""

from __future__ import annotations

import random
import shutil

import pytest
import torch

from eventloop.checkpoint import manifest
from eventloop.checkpoint.checkpoint_files import read_checkpoint
from eventloop.checkpoint.verifying import batch_of, examine, name_of
from eventloop.errors import CheckpointError
from eventloop.files.disk import CorruptFileError


@pytest.fixture
def newest(store, parts):
    """The folder of the newer of two checkpoints."""
    store.save(2, parts, {"loss": 0.5})
    return store.save(3, parts, {"loss": 0.25})


@pytest.fixture
def refused(newest, store):
    """Asserts that nobody takes the newest, and the one before is taken; gives the reason."""

    def refused():
        latest, ((path, reason),) = store.latest()
        assert (latest.name, path) == ("ba00000002", newest)
        with pytest.raises(CheckpointError) as caught:
            read_checkpoint(newest)
        assert caught.value.what == f"the checkpoint {str(newest)!r} can't be used: {reason}"
        return reason

    return refused


def test_nothing_is_refused_that_is_whole(newest, store):
    """The negative control of all that follow."""
    read_checkpoint(newest)
    assert store.latest() == (newest, [])


def test_truncation_anywhere_is_found(newest, refused):
    """At 50 points of each file, its beginning and its last byte among them."""
    for path in sorted(newest.iterdir()):
        data = path.read_bytes()
        points = {0, 1, 7, 8, 9, len(data) - 1, *range(0, len(data), len(data) // 45 + 1)}
        for point in sorted(points):
            path.write_bytes(data[:point])

            assert refused().startswith(f"{path.name}: ")
        path.write_bytes(data)
    read_checkpoint(newest)


def test_a_flipped_bit_anywhere_is_found(newest, refused):
    """500 of them, over all files; each is put right again."""
    draw = random.Random(0)
    paths = sorted(newest.iterdir())
    sizes = [one.stat().st_size for one in paths]
    for _ in range(500):
        (path,) = draw.choices(paths, sizes)
        data = bytearray(whole := path.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)

        assert refused().startswith(f"{path.name}: ")
        path.write_bytes(whole)
    read_checkpoint(newest)


def test_every_byte_of_the_manifest_is_guarded(newest):
    """It has no other file to vouch for it."""
    path = newest / "manifest.json"
    data = path.read_bytes()
    for bit in range(0, 8 * len(data), 5):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)

        with pytest.raises(CorruptFileError, match=r"manifest.json"):
            manifest.read_manifest(newest)


@pytest.mark.parametrize("size", [1, 4096])
def test_more_bytes_are_found(newest, refused, size):
    """Zeros at the end are what some file systems leave after a crash."""
    for path in sorted(newest.iterdir()):
        data = path.read_bytes()
        path.write_bytes(data + bytes(size))

        assert refused().startswith(f"{path.name}: ")
        path.write_bytes(data)


def test_a_zeroed_page_is_found(store):
    """In the middle of weights that aren't zeros."""
    path = store.save(1, {"model": {"w": torch.arange(10_000)}}, {})
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(8192)
        file.write(bytes(4096))

    ((_, reason),) = store.latest()[1]

    assert reason.startswith("model.safetensors: ")
    assert "the digest differs" in reason


@pytest.mark.parametrize("name", ["model.safetensors", "clock.json", "manifest.json"])
def test_a_missing_file_is_named(name, newest, refused):
    """Nothing is made up for it."""
    (newest / name).unlink()

    assert refused() == f"{name}: it can't be read: No such file or directory"


@pytest.mark.parametrize("names", [("one", "two"), ("one", "three")])
def test_swapped_files_are_found(names, store):
    """Even of one size and form."""
    parts = {"one": torch.ones(2), "two": torch.zeros(2), "three": torch.zeros(3)}
    path = store.save(1, {name: {"w": tensor} for name, tensor in parts.items()}, {})
    one, other = (path / f"{name}.safetensors" for name in names)
    one.rename(path / "kept")
    other.rename(one)
    (path / "kept").rename(other)

    latest, ((_, reason),) = store.latest()

    assert latest is None
    assert reason.startswith(("one.safetensors: ", "three.safetensors: "))


def test_an_empty_manifest_is_none(newest, refused):
    """What some file systems leave of a file that wasn't synced."""
    (newest / "manifest.json").write_bytes(b"")

    assert refused() == "manifest.json: it is empty"


@pytest.mark.parametrize("names", [["manifest.json"], None])
def test_what_belongs_to_another_step_is_refused(names, newest, refused):
    """The manifest alone, or all of it: the files have the same shapes."""
    for name in names or [one.name for one in newest.iterdir()]:
        shutil.copy(newest.with_name("ba00000002") / name, newest)

    assert "it belongs to batch 2, but the folder to 3" in refused()


def test_sizes_alone_are_looked_at_without_digests(newest):
    """To list many checkpoints; a changed byte needs the digests."""
    data = (newest / "clock.json").read_bytes()
    (newest / "clock.json").write_bytes(data[::-1])

    assert examine(newest, digests=False).batch == 3
    with pytest.raises(CorruptFileError, match="digest"):
        examine(newest)
    (newest / "clock.json").write_bytes(data[:-1])
    with pytest.raises(CorruptFileError, match=r"clock.json: it has .* bytes, manifest.json says"):
        examine(newest, digests=False)


def test_names_of_folders_say_the_batch():
    """And nothing else has one."""
    assert name_of(1200) == "ba00001200"
    assert [batch_of(name_of(batch)) for batch in (0, 7, 10**12)] == [0, 7, 10**12]
    for name in ["ba1200", "ba000001200", ".tmp-ba00001200-a", "ba00001200-a", "ba", "xba00001200"]:
        assert batch_of(name) is None
