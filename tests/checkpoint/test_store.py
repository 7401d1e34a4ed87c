"""The checkpoints of a run: found by looking, replaced and removed so that one is always there."""

from __future__ import annotations

import errno
import os
import shutil

import pytest
import torch

from eventloop.checkpoint.checkpoint_files import read_checkpoint
from eventloop.checkpoint.store import Store
from eventloop.errors import CheckpointError
from eventloop.files import disk

# Saving and finding


def test_what_is_saved_is_found(store, parts, same, names):
    """Under the name of its batch, with nothing beside it."""
    path = store.save(1200, parts, {"a": (1,)})

    (found,) = store.found()
    assert (path, names(store)) == (store.folder / "ba00001200", ["ba00001200"])
    assert (found.path, found.batch, found.facts, found.reason) == (path, 1200, {"a": (1,)}, "")
    assert found.num_bytes == sum(
        one.stat().st_size for one in path.iterdir() if one.name != "manifest.json"
    )
    assert store.latest() == (path, [])
    assert same(read_checkpoint(path).parts["model"], parts["model"])


def test_two_machines_may_bring_the_same_at_once(store, parts, tmp_path, monkeypatch, names):
    """As each downloads a checkpoint of a URL, where they share the folder for copies."""
    other = Store(tmp_path / "other").save(1, parts, {})
    rename = disk.rename

    def brought_meanwhile(source, target):
        if target.name == "ba00000001" and not target.exists():
            shutil.copytree(other, target)
        rename(source, target)

    monkeypatch.setattr(disk, "rename", brought_meanwhile)

    assert store.save(1, parts, {}) == store.folder / "ba00000001"
    assert names(store) == ["ba00000001"]
    assert store.latest() == (store.folder / "ba00000001", [])


def test_nothing_is_found_where_nothing_is(store):
    """Before the first save, and looking makes nothing."""
    assert (store.found(), store.latest(), store.prune([])) == ([], (None, []), [])
    assert not store.folder.exists()


def test_the_newest_is_the_one_with_the_most_batches(three, parts):
    """Whenever it was written; above 10**8 batches names no longer sort by themselves."""
    three.save(10**9, parts, {})
    three.save(4, parts, {})

    assert [one.batch for one in three.found()] == [10**9, 4, 3, 2, 1]
    assert three.latest()[0].name == "ba1000000000"


@pytest.mark.parametrize("name", [".tmp-ba00000009-x", "ba9", "ba00000009-copy", "latest", "x"])
def test_other_names_are_no_checkpoints(name, three):
    """Even with a whole one in it."""
    shutil.copytree(three.folder / "ba00000003", three.folder / name)

    assert [one.batch for one in three.found(digests=True)] == [3, 2, 1]


def test_latest_goes_back_to_one_that_verifies(three, damage):
    """And names those that don't, with the reason."""
    damage(three.folder / "ba00000003")
    (three.folder / "ba00000002" / "manifest.json").write_bytes(b"")

    path, refused = three.latest()

    assert path == three.folder / "ba00000001"
    assert refused == [
        (
            three.folder / "ba00000003",
            "model.safetensors: its bytes aren't those that were written: the digest differs",
        ),
        (three.folder / "ba00000002", "manifest.json: it is empty"),
    ]


def test_with_none_left_there_is_no_latest(three, damage):
    """Whoever resumes must say so, not begin again in silence."""
    for one in three.found():
        damage(one.path)

    path, refused = three.latest()

    assert path is None
    assert [one.name for one, _ in refused] == ["ba00000003", "ba00000002", "ba00000001"]


def test_a_renamed_checkpoint_is_not_that_of_another_batch(three):
    """The manifest says which it is."""
    (three.folder / "ba00000003").rename(three.folder / "ba00000007")

    path, ((_, reason),) = three.latest()

    assert path.name == "ba00000002"
    assert "belongs to batch 3, but the folder to 7" in reason


def test_looking_without_digests_still_finds_what_is_missing(three, damage):
    """To list hundreds of checkpoints in a moment."""
    damage(three.folder / "ba00000003")
    (three.folder / "ba00000002" / "clock.json").unlink()

    assert [bool(one.reason) for one in three.found()] == [False, True, False]
    assert [bool(one.reason) for one in three.found(digests=True)] == [True, True, False]


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_is_no_folder_is_no_checkpoint(kind, three, tmp_path, names):
    """A link may lead out of the run; it isn't followed, and may be replaced."""
    path = three.folder / "ba00000004"
    if kind == "link":
        path.symlink_to(three.folder / "ba00000003")
    else:
        path.touch()

    latest, refused = three.latest()
    three.save(4, {}, {})

    assert latest.name == "ba00000003"
    assert refused == [(path, "it is a link, or not a folder")]
    assert three.latest()[0] == path
    assert names(three) == [f"ba0000000{batch}" for batch in (1, 2, 3, 4)]
    read_checkpoint(three.folder / "ba00000003")


def test_a_folder_that_can_not_be_listed_is_named(three, monkeypatch):
    """Not taken for an empty one: the run would begin again."""
    monkeypatch.setattr("eventloop.checkpoint.store.os.scandir", fails_with(errno.EACCES))

    with pytest.raises(CheckpointError, match=r"checkpoints' can't be listed: Permission denied"):
        three.latest()


# Replacing


def test_an_equal_checkpoint_is_kept(three, parts, names):
    """A resumed run that comes by again writes the same bytes."""
    before = (three.folder / "ba00000003").stat().st_ino

    three.save(3, parts, {"batch": 3})

    assert (three.folder / "ba00000003").stat().st_ino == before
    assert names(three) == ["ba00000001", "ba00000002", "ba00000003"]


@pytest.mark.parametrize("change", ["parts", "facts", "damage"])
def test_one_that_differs_or_is_damaged_is_replaced(change, three, parts, names, damage):
    """The newer one is what the run knows now."""
    facts = {"batch": "other" if change == "facts" else 3}
    if change == "parts":
        parts["model"]["0.bias"] += 1
    if change == "damage":
        damage(three.folder / "ba00000003")

    path = three.save(3, parts, facts)

    assert read_checkpoint(path).facts == facts
    assert torch.equal(read_checkpoint(path).parts["model"]["0.bias"], parts["model"]["0.bias"])
    assert names(three) == ["ba00000001", "ba00000002", "ba00000003"]


def test_a_failed_replacement_leaves_the_one_before(three, parts, monkeypatch, names):
    """Its name was free for a moment."""
    rename = disk.rename

    def fail(source, target):
        if source.name.startswith(".tmp-"):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(disk, "rename", fail)

    with pytest.raises(CheckpointError, match="Input/output error"):
        three.save(3, parts, {"batch": "other"})
    assert names(three) == ["ba00000001", "ba00000002", "ba00000003"]
    assert read_checkpoint(three.folder / "ba00000003").facts == {"batch": 3}


# Removing


def test_what_can_not_be_removed_is_named(three, monkeypatch):
    """A disk fills up otherwise, and nobody knows why."""
    monkeypatch.setattr(disk, "remove_file", fails_with(errno.EACCES))

    with pytest.raises(CheckpointError, match=r"ba00000001' can't be removed: Permission denied"):
        three.prune([3])
    assert three.latest()[0].name == "ba00000003"


def fails_with(number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


def test_two_stores_are_independent(tmp_path, parts):
    """Nothing is kept between calls but the folder."""
    one, other = Store(tmp_path / "a"), Store(tmp_path / "b")

    one.save(1, parts, {})

    assert other.found() == []
    assert Store(tmp_path / "a").latest() == one.latest()
