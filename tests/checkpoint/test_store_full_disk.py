"""A disk that is full or breaks while something is saved: said in numbers, and nothing is left."""

from __future__ import annotations

import errno
import itertools
import os
import re
import subprocess

import pytest
import torch

from eventloop.checkpoint import checkpoint_files, verifying
from eventloop.checkpoint.store import Store
from eventloop.errors import CheckpointError
from eventloop.files import disk

MB = 2**20
PARTS = {"model": {"w": torch.zeros(MB)}, "clock": {"batch": 1}}  # 4 MB


def numbers_of(error):
    """Returns the bytes needed and free, as the message says them."""
    found = re.search(r"needed +([\d,]+) bytes\n +free +([\d,]+) bytes\n +fix ", str(error))
    return tuple(int(one.replace(",", "")) for one in found.groups())


class CountedDisk:
    """A disk of so many bytes, as far as `disk` is concerned: for who may not mount one."""

    def __init__(self, folder, num_bytes, monkeypatch):
        self.folder, self.num_bytes, self.write = folder, num_bytes, disk.write
        monkeypatch.setattr(disk, "write", self.write_some)
        monkeypatch.setattr(disk, "num_free_bytes", lambda path: self.num_free())

    def num_free(self):
        used = sum(one.stat().st_size for one in self.folder.rglob("*") if one.is_file())
        return max(0, self.num_bytes - used)

    def write_some(self, descriptor, data):
        fits = data[: self.num_free()]
        self.write(descriptor, fits)
        if len(fits) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def small_disk(tmp_path, monkeypatch):
    """A folder on a file system of 10 MB: a real one where it may be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=10m", "none", str(folder)]
    try:
        is_mounted = not subprocess.run(mount, capture_output=True, check=False).returncode
    except FileNotFoundError:
        is_mounted = False
    if not is_mounted:
        CountedDisk(folder, 10 * MB, monkeypatch)
    yield folder
    if is_mounted:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def counted_disk(tmp_path, monkeypatch):
    """The same, counted."""
    CountedDisk(tmp_path, 10 * MB, monkeypatch)
    return tmp_path


@pytest.fixture(params=["small_disk", "counted_disk"])
def store(request):
    """A store on a disk of 10 MB with a checkpoint of 4 MB."""
    store = Store(request.getfixturevalue(request.param) / "checkpoints")
    store.save(1, PARTS, {})
    return store


def fill(store, num_left):
    """Writes a file that leaves so many bytes free."""
    with (store.folder.parent / "other").open("wb") as file:
        file.write(bytes(disk.num_free_bytes(store.folder) - num_left))


def test_what_does_not_fit_is_not_begun(store, monkeypatch, names):
    """It would take long to find out otherwise."""
    fill(store, MB)
    free = disk.num_free_bytes(store.folder)
    monkeypatch.setattr(disk, "create", None)

    with pytest.raises(
        CheckpointError, match=r"can't be written to .*: there isn't enough space"
    ) as got:
        store.save(2, PARTS, {})

    needed, said = numbers_of(got.value)
    assert 4 * MB < needed < 4.1 * MB
    assert said == free
    assert names(store) == ["ba00000001"]


def test_a_disk_that_fills_up_meanwhile_is_left_as_it_was(store, monkeypatch, names):
    """Others write, too. What had been written is removed, and that is what is free."""
    fill(store, 2 * MB)
    free = disk.num_free_bytes(store.folder)
    really = disk.num_free_bytes
    answers = itertools.chain([10**12], itertools.repeat(None))
    monkeypatch.setattr(disk, "num_free_bytes", lambda path: next(answers) or really(path))

    with pytest.raises(CheckpointError, match="No space left on device") as got:
        store.save(2, PARTS, {})

    needed, said = numbers_of(got.value)
    assert needed > 4 * MB
    assert abs(said - free) < 64 * 1024
    assert names(store) == ["ba00000001"]
    assert store.latest() == (store.folder / "ba00000001", [])


def test_with_space_again_saving_goes_on(store):
    """Nothing is remembered of the failure."""
    fill(store, 2 * MB)
    with pytest.raises(CheckpointError):
        store.save(2, PARTS, {})
    (store.folder.parent / "other").unlink()

    path = store.save(2, PARTS, {})

    assert store.latest() == (path, [])


def test_what_is_needed_is_what_is_written(tmp_path, parts):
    """In whole blocks of the disk, so that an estimate that fits is one."""
    draft = checkpoint_files.Draft(parts, {"a": [1]}, 3)
    checkpoint_files.write_checkpoint(tmp_path / "a", parts, {"a": [1]}, batch=3)
    written = sum(one.stat().st_size for one in (tmp_path / "a").iterdir())

    assert written <= draft.num_bytes <= written + 6 * 4096


def fails_at(number, at, monkeypatch):
    """Has the operation of this number fail, once, as the disk does; gives the names of those done."""
    done = []

    def failing(name, function):
        def operate(*arguments):
            done.append(name)
            if len(done) == at + 1:
                raise OSError(number, os.strerror(number))
            return function(*arguments)

        return operate

    for name in ("make_folder", "create", "write", "sync", "sync_folder", "rename"):
        monkeypatch.setattr(disk, name, failing(name, getattr(disk, name)))
    return done


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("batch", [2, 3])
def test_a_failure_at_any_point_leaves_what_was(number, batch, tmp_path, parts, names):
    """Of a new checkpoint nothing, of one to be replaced that which was there."""
    for at in itertools.count():
        store = Store(tmp_path / str(at))
        for one in (1, 2):
            store.save(one, {}, {"of": "start"})
        with pytest.MonkeyPatch.context() as patch:
            done = fails_at(number, at, patch)
            try:
                store.save(batch, parts, {})
                failed = None
            except CheckpointError as error:
                failed = error

        latest, refused = store.latest()
        assert refused == []
        if failed is None:
            assert latest.name == verifying.name_of(batch)
            if len(done) <= at:
                break
            continue
        assert os.strerror(number) in failed.what
        assert numbers_of(failed)[0] > 0
        assert not any(one.startswith(".tmp") for one in names(store))
        if done.count("rename") < batch_renames(batch) or done[at] == "rename":
            assert latest.name == "ba00000002"
            assert names(store) == ["ba00000001", "ba00000002"]
            assert store.found()[0].facts == {"of": "start"}
    assert at > 10


def batch_renames(batch):
    """Returns after how many renames a checkpoint has its name."""
    return {2: 2, 3: 1}[batch]


def test_a_partial_checkpoint_outside_of_a_store_is_removed(tmp_path, parts, monkeypatch):
    """`write_checkpoint` alone leaves no file, either."""
    fails_at(errno.ENOSPC, 5, monkeypatch)

    with pytest.raises(CheckpointError, match="No space left"):
        checkpoint_files.write_checkpoint(tmp_path / "a", parts, {})

    assert list((tmp_path / "a").iterdir()) == []
