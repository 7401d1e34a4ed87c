"""The checkpoints of a run: found by looking, replaced and removed so that one is always there."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time

import pytest
import torch

from eventloop.checkpoint import retention
from eventloop.checkpoint.checkpoint_files import read_checkpoint, verify
from eventloop.checkpoint.retention import ALIVE_S, new_id
from eventloop.checkpoint.store import Store
from eventloop.errors import CheckpointError
from eventloop.files import disk


@pytest.fixture
def three(store, parts):
    """A store with the checkpoints of batches 1, 2 and 3."""
    for batch in (1, 2, 3):
        store.save(batch, parts, {"batch": batch})
    return store


def names(store):
    return sorted(one.name for one in store.folder.iterdir())


def damage(path):
    """Changes one byte of the weights."""
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xaa")


def place(name):
    """Returns what an ID says of a place: this machine and boot, or another."""
    return {"here": retention.this_machine(), "elsewhere": "0" * 8}[name]


@pytest.fixture
def dead():
    """Returns the id of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


# Saving and finding


def test_what_is_saved_is_found(store, parts, same):
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


def test_two_machines_may_bring_the_same_at_once(store, parts, tmp_path, monkeypatch):
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


def test_latest_goes_back_to_one_that_verifies(three):
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


def test_with_none_left_there_is_no_latest(three):
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
    assert "that of batch 3, the folder's name says 7" in reason


def test_looking_without_digests_still_finds_what_is_missing(three):
    """To list hundreds of checkpoints in a moment."""
    damage(three.folder / "ba00000003")
    (three.folder / "ba00000002" / "clock.json").unlink()

    assert [bool(one.reason) for one in three.found()] == [False, True, False]
    assert [bool(one.reason) for one in three.found(digests=True)] == [True, True, False]


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_is_no_folder_is_no_checkpoint(kind, three, tmp_path):
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
    verify(three.folder / "ba00000003")


def test_a_folder_that_can_not_be_listed_is_named(three, monkeypatch):
    """Not taken for an empty one: the run would begin again."""
    monkeypatch.setattr("eventloop.checkpoint.store.os.scandir", fails_with(errno.EACCES))

    with pytest.raises(CheckpointError, match=r"checkpoints' can't be listed: Permission denied"):
        three.latest()


# Replacing


def test_an_equal_checkpoint_is_kept(three, parts):
    """A resumed run that comes by again writes the same bytes."""
    before = (three.folder / "ba00000003").stat().st_ino

    three.save(3, parts, {"batch": 3})

    assert (three.folder / "ba00000003").stat().st_ino == before
    assert names(three) == ["ba00000001", "ba00000002", "ba00000003"]


@pytest.mark.parametrize("change", ["parts", "facts", "damage"])
def test_one_that_differs_or_is_damaged_is_replaced(change, three, parts):
    """The newer one is what the run knows now."""
    facts = {"batch": "other" if change == "facts" else 3}
    if change == "parts":
        parts["model"]["0.bias"] += 1
    if change == "damage":
        damage(three.folder / "ba00000003")

    path = three.save(3, parts, facts)

    assert verify(path) == facts
    assert torch.equal(read_checkpoint(path).parts["model"]["0.bias"], parts["model"]["0.bias"])
    assert names(three) == ["ba00000001", "ba00000002", "ba00000003"]


def test_a_failed_replacement_leaves_the_one_before(three, parts, monkeypatch):
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
    assert verify(three.folder / "ba00000003") == {"batch": 3}


# Removing


@pytest.mark.parametrize(
    ("keep", "left"),
    [([3], [3]), ([1, 3, 9], [1, 3]), ([], [3]), ([9], [3]), ([1, 2, 3], [1, 2, 3])],
)
def test_all_but_those_to_keep_are_removed(keep, left, three):
    """But one always stays: the newest, if none is to be kept."""
    removed = three.prune(keep)

    assert names(three) == [f"ba0000000{batch}" for batch in left]
    assert sorted(one.name for one in removed) == sorted(
        f"ba0000000{batch}" for batch in {1, 2, 3} - set(left)
    )


def test_the_last_one_that_verifies_is_never_removed(three):
    """Those that were to be kept may be damaged."""
    damage(three.folder / "ba00000003")
    damage(three.folder / "ba00000002")

    three.prune([3])

    assert names(three) == ["ba00000001", "ba00000003"]


def test_where_none_verifies_none_is_removed(three):
    """Somebody may be able to rescue something."""
    for one in three.found():
        damage(one.path)

    assert three.prune([3]) == []
    assert len(names(three)) == 3


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


# Leftovers


def test_what_a_dead_process_left_is_removed(three, parts, dead):
    """By the next save or start."""
    for call in (three.clear, lambda: three.save(4, parts, {})):
        left = three.folder / f".tmp-ba00000009-{place('here')}-{dead}-0123abcd"
        left.mkdir()
        (left / "model.safetensors").touch()

        call()

        assert not left.exists()


def test_what_a_living_process_is_at_is_left_alone(three, parts):
    """Another process, or another thread of this one."""
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    with new_id() as ours:
        ids = [f"{place('here')}-{child.pid}-0123abcd", ours]
        paths = [three.folder / f".tmp-ba00000009-{one}" for one in ids]
        for path in paths:
            path.mkdir()

        three.clear()
        three.save(4, parts, {})

        assert all(path.exists() for path in paths)
        child.communicate()
        three.clear()
        assert [path.exists() for path in paths] == [False, True]
    three.clear()
    assert names(three) == [f"ba0000000{batch}" for batch in (1, 2, 3, 4)]


def test_what_another_machine_is_at_is_left_alone_for_a_day(three, dead):
    """Nobody here can know whether its process lives; unless it is known that none does."""
    paths = [
        three.folder / f".tmp-ba00000009-{place('elsewhere')}-{dead}-{number:08x}"
        for number in range(3)
    ]
    for path in paths:
        path.mkdir()
    (paths[1] / "model.safetensors").touch()
    old = time.time() - ALIVE_S - 1
    for path in paths[:2]:
        os.utime(path, (old, old))

    three.clear()
    assert [path.exists() for path in paths] == [False, True, True]
    three.clear(alone=True)
    assert not any(path.exists() for path in paths)


@pytest.mark.parametrize(
    "name", [".tmp-ba00000009", ".tmp-x", ".tmp-ba00000009-a-b-c", "tmp", ".git"]
)
def test_what_has_another_name_is_nobodys_leftover(name, three):
    """Nothing is removed that wasn't made here."""
    (three.folder / name).mkdir()

    three.clear(alone=True)

    assert (three.folder / name).exists()


def replaced_by_the_dead(store, dead):
    """Renames the newest as a save does just before it gives its name to a newer one."""
    return (store.folder / "ba00000003").rename(replaced_name(store, dead))


def replaced_name(store, pid):
    return store.folder / f".was-ba00000003-{place('here')}-{pid}-0123abcd"


def test_what_was_being_replaced_counts_until_it_is_put_back(three, dead):
    """A process may be killed between the two renames."""
    path = replaced_by_the_dead(three, dead)

    assert three.latest() == (path, [])
    assert read_checkpoint(path).batch == 3
    three.prune([3])
    assert three.latest() == (path, [])
    three.clear()
    assert three.latest() == (three.folder / "ba00000003", [])
    assert names(three) == ["ba00000003"]


@pytest.mark.parametrize(
    ("damaged", "facts"), [(None, "newer"), ("newer", 3), ("older", "newer"), ("both", "newer")]
)
def test_of_two_the_newer_stays_if_it_is_whole(damaged, facts, three, parts, dead):
    """A process may be killed before it removes the older one."""
    shutil.copytree(three.folder / "ba00000003", three.folder / "kept")
    newer = three.save(3, parts, {"batch": "newer"})
    older = (three.folder / "kept").rename(replaced_name(three, dead))
    for path in {"newer": [newer], "older": [older], "both": [newer, older], None: []}[damaged]:
        damage(path)

    latest = three.latest()[0]
    three.clear()

    assert names(three) == ["ba00000001", "ba00000002", "ba00000003"]
    if damaged == "both":
        assert latest.name == "ba00000002"
    else:
        assert latest == (older if damaged == "newer" else newer)
        assert verify(newer) == {"batch": facts}


def test_another_processes_replacement_is_left_alone(three):
    """It is about to give the name away."""
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    path = replaced_by_the_dead(three, child.pid)

    three.clear()
    assert path.exists()
    child.communicate()
    three.clear()
    assert not path.exists()


def test_folders_in_folders_do_not_end_a_save(three, parts, dead, monkeypatch):
    """A stranger's run may have thousands in each other; Python removes them by recursion."""
    left = three.folder / f".tmp-ba00000009-{place('here')}-{dead}-0123abcd"
    (left / "a").mkdir(parents=True)

    def fail(path):
        raise RecursionError

    monkeypatch.setattr(disk.shutil, "rmtree", fail)

    three.save(4, parts, {})

    assert three.latest()[0].name == "ba00000004"


def test_links_in_leftovers_are_not_followed(three, dead):
    """Only the link goes."""
    left = three.folder / f".tmp-ba00000009-{place('here')}-{dead}-0123abcd"
    left.mkdir()
    (left / "link").symlink_to(three.folder / "ba00000003")

    three.clear()

    assert not left.exists()
    verify(three.folder / "ba00000003")


def test_two_stores_are_independent(tmp_path, parts):
    """Nothing is kept between calls but the folder."""
    one, other = Store(tmp_path / "a"), Store(tmp_path / "b")

    one.save(1, parts, {})

    assert other.found() == []
    assert Store(tmp_path / "a").latest() == one.latest()
