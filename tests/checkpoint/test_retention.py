"""Which checkpoints are kept, and which folders of processes that have ended are removed."""

from __future__ import annotations

import os
import shutil
import subprocess
import time

import pytest

from eventloop.checkpoint import retention
from eventloop.checkpoint.checkpoint_files import read_checkpoint
from eventloop.checkpoint.retention import ALIVE_S, new_id
from eventloop.files import disk
from eventloop_testing.case import isolated_trainer


def test_the_newest_are_kept(tmp_path):
    """Disks are finite."""
    given = {"checkpoint_interval": "1ba", "checkpoint_keep": 3, "max_duration": "2ep"}

    with isolated_trainer(tmp_path, **given) as trainer:
        trainer.fit()

    kept = sorted(one.name for one in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["ba00000004", "ba00000005", "ba00000006"]


def place(name):
    """Returns what an ID says of a place: this machine and boot, or another."""
    return {"here": retention.this_machine(), "elsewhere": "0" * 8}[name]


@pytest.fixture
def dead():
    """Returns the id of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.mark.parametrize(
    ("keep", "left"),
    [([3], [3]), ([1, 3, 9], [1, 3]), ([], [3]), ([9], [3]), ([1, 2, 3], [1, 2, 3])],
)
def test_all_but_those_to_keep_are_removed(keep, left, three, names):
    """But one always stays: the newest, if none is to be kept."""
    removed = three.prune(keep)

    assert names(three) == [f"ba0000000{batch}" for batch in left]
    assert sorted(one.name for one in removed) == sorted(
        f"ba0000000{batch}" for batch in {1, 2, 3} - set(left)
    )


def test_the_last_one_that_verifies_is_never_removed(three, names, damage):
    """Those that were to be kept may be damaged."""
    damage(three.folder / "ba00000003")
    damage(three.folder / "ba00000002")

    three.prune([3])

    assert names(three) == ["ba00000001", "ba00000003"]


def test_where_none_verifies_none_is_removed(three, names, damage):
    """Somebody may be able to rescue something."""
    for one in three.found():
        damage(one.path)

    assert three.prune([3]) == []
    assert len(names(three)) == 3


def test_what_a_dead_process_left_is_removed(three, parts, dead):
    """By the next save or start."""
    for call in (three.clear, lambda: three.save(4, parts, {})):
        left = three.folder / f".tmp-ba00000009-{place('here')}-{dead}-0123abcd"
        left.mkdir()
        (left / "model.safetensors").touch()

        call()

        assert not left.exists()


def test_what_a_living_process_is_at_is_left_alone(three, parts, names):
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


def test_what_was_being_replaced_counts_until_it_is_put_back(three, dead, names):
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
def test_of_two_the_newer_stays_if_it_is_whole(damaged, facts, three, parts, dead, names, damage):
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
        assert read_checkpoint(newer).facts == {"batch": facts}


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
    read_checkpoint(three.folder / "ba00000003")
