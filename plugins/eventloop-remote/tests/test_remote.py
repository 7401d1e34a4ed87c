"""Checkpoints in a store of objects: uploaded, found, verified, replaced and removed."""

from __future__ import annotations

import errno

import pytest
import torch

from eventloop import CheckpointError
from eventloop.checkpoint.checkpoint_files import read_checkpoint
from eventloop.checkpoint.verifying import key_of
from eventloop.storage import Url

FOLDER = "/run/checkpoints"


@pytest.fixture
def store(bucket, tmp_path):
    """A store in which nothing is yet."""
    return bucket.store(tmp_path / "copies")


@pytest.fixture
def three(store, parts):
    """A store with the checkpoints of batches 1, 2 and 3."""
    for batch in (1, 2, 3):
        store.save(batch, parts, {"batch": batch})
    return store


@pytest.fixture
def another(bucket, tmp_path):
    """Returns the store as another machine sees it, which has no copies."""
    return lambda: bucket.store(tmp_path / "elsewhere")


def folders(bucket):
    return sorted({path.removeprefix(FOLDER).split("/")[1] for path in bucket.paths})


def downloads(bucket):
    """Returns what was read beside manifests."""
    return [path for name, path in bucket.done if name == "open" and "manifest" not in path]


def copies(store):
    folder = store._copies.folder
    return sorted(one.name for one in folder.iterdir()) if folder.exists() else []


# Saving and finding


def test_what_is_saved_is_found(bucket, store, another, parts):
    """By another machine, too, which downloads it; on a disk it would have the same files."""
    url = store.save(1200, parts, {"a": (1,)})

    (found,) = another().found()
    assert (url, folders(bucket)) == (Url("flaky://run/checkpoints/ba00001200"), ["ba00001200"])
    assert (found.path, found.batch, found.facts, found.reason) == (url, 1200, {"a": (1,)}, "")
    assert another().latest() == (url, [])
    checkpoint = read_checkpoint(another().download(url))
    torch.testing.assert_close(checkpoint.parts["model"], parts["model"], rtol=0, atol=0)
    assert {path.rpartition("/")[2] for path in bucket.paths} == {
        one.name for one in checkpoint.path.iterdir()
    }


def test_nothing_is_found_where_nothing_is(bucket, store):
    """Before the first save, and looking makes nothing."""
    assert (store.found(), store.latest(), store.prune([])) == ([], (None, []), [])
    assert (bucket.paths, copies(store)) == ([], [])


def test_the_manifest_comes_last(bucket, store, parts):
    """Whoever looks meanwhile sees no checkpoint."""
    store.save(1, parts, {})

    written = [path for name, path in bucket.done if name in ("put_file", "pipe_file", "mv")]
    assert "manifest.json" in written[-1]
    assert not any("manifest.json" in path for path in written[: -2 if bucket.is_torn else -1])


def test_a_folder_without_a_manifest_does_not_count(bucket, three, another):
    """Its upload is under way, or was killed; of this another says nothing, either."""
    del bucket.kind.store[f"{FOLDER}/ba00000003/manifest.json"]

    path, refused = another().latest()

    assert (path.name, refused) == ("ba00000002", [])


@pytest.mark.parametrize("name", ["ba9", "ba00000009-copy", "ba00000009.x", ".tmp-ba00000009", "x"])
def test_other_names_are_no_checkpoints(name, bucket, three, another):
    """Even with a whole one in it, and nobody removes them."""
    for path in bucket.paths:
        if "/ba00000003/" in path:
            other = path.replace("ba00000003", name)
            bucket.kind.store[other] = bucket.kind.store[path]

    assert [one.batch for one in another().found(digests=True)] == [3, 2, 1]
    three.clear()
    assert name in folders(bucket)


def test_latest_goes_back_to_one_that_verifies(bucket, three, another):
    """And names those that don't, with the reason."""
    bucket.change(f"{FOLDER}/ba00000003/model.safetensors")
    bucket.change(f"{FOLDER}/ba00000002/manifest.json")

    path, refused = another().latest()

    assert path.name == "ba00000001"
    assert [one.name for one, _ in refused] == ["ba00000003", "ba00000002"]
    assert "model.safetensors: its bytes aren't those that were written" in refused[0][1]
    assert "manifest.json: it is damaged" in refused[1][1]
    assert read_checkpoint(another().download(path)).facts == {"batch": 1}


def test_a_copy_that_is_here_is_not_downloaded(bucket, three):
    """A run that goes on where it was needs no gigabytes for it."""
    bucket.done.clear()

    path, _ = three.latest()
    read_checkpoint(three.download(path))

    assert downloads(bucket) == []


def test_a_copy_that_differs_is_not_used(bucket, three, parts, another):
    """What the store has counts."""
    other = another()
    other.download(three.folder / "ba00000003")
    parts["model"]["0.bias"] += 1
    url = three.save(3, parts, {})

    weights = read_checkpoint(other.download(url)).parts["model"]["0.bias"]

    assert torch.equal(weights, parts["model"]["0.bias"])


def test_a_damaged_copy_is_downloaded_again(three):
    """Disks fail, too."""
    copy = three.download(three.folder / "ba00000003")
    (copy / "model.safetensors").write_bytes(b"")

    assert three.latest()[0].name == "ba00000003"
    assert read_checkpoint(copy).facts == {"batch": 3}


def test_the_copy_of_one_checkpoint_is_kept(three, another):
    """The disk of a machine that needs a store isn't large."""
    other = another()
    other.found(digests=True)

    assert copies(three) == ["ba00000003"]
    assert copies(other) == ["ba00000001"]


def test_looking_without_digests_still_finds_what_is_missing(bucket, three, another):
    """Only manifests are read for it."""
    bucket.change(f"{FOLDER}/ba00000003/model.safetensors")
    del bucket.kind.store[f"{FOLDER}/ba00000002/clock.json"]
    bucket.done.clear()

    assert [one.reason[:31] for one in another().found()] == [
        "",
        "clock.json: it isn't there, man",
        "",
    ]
    assert downloads(bucket) == []


def test_no_more_is_downloaded_than_the_manifest_says(bucket, three, another, tmp_path):
    """Of an object that grows, that is what was digested; a stranger's fills no disk."""
    path = f"{FOLDER}/ba00000003/model.safetensors"
    whole = bucket.kind.store[path].getvalue()

    def grow(name, about):
        if name == "open" and about == path:
            bucket.kind.store[path].seek(0)
            bucket.kind.store[path].write(whole + b"more")

    bucket.fail = grow

    latest, refused = another().latest()

    assert (latest.name, refused) == ("ba00000003", [])
    copy = tmp_path / "elsewhere" / "ba00000003" / "model.safetensors"
    assert copy.read_bytes() == whole


def test_a_renamed_checkpoint_is_not_that_of_another_batch(bucket, three, another):
    """The manifest says which it is."""
    for path in bucket.paths:
        if "/ba00000003/" in path:
            other = path.replace("ba00000003", "ba00000007")
            bucket.kind.store[other] = bucket.kind.store[path]

    path, ((_, reason),) = another().latest()

    assert (path.name, reason) == ("ba00000003", "manifest.json: it belongs to batch 3")


@pytest.mark.parametrize("name", ["x", "ba9", "ba00000009"])
def test_what_is_no_checkpoint_can_not_be_downloaded(name, three):
    """The name of another run, or a mistake."""
    with pytest.raises(CheckpointError, match=f"checkpoints/{name}' can't be used: "):
        three.download(three.folder / name)


# Replacing


def test_an_equal_checkpoint_is_kept(bucket, three, parts):
    """Nothing is uploaded twice."""
    bucket.done.clear()

    url = three.save(3, parts, {"batch": 3})

    assert url.name == "ba00000003"
    assert not [path for name, path in bucket.done if name in ("put_file", "pipe_file")]


def test_two_of_a_batch_are_settled_before_another_is_written(bucket, three, another, parts):
    """They are downloaded for it, in the place of the local copy that is uploaded later."""
    for path in bucket.paths:
        if "/ba00000003/" in path:
            twin = path.replace("ba00000003", "ba00000003.1-0123abcd")
            bucket.kind.store[twin] = bucket.kind.store[path]

    url = another().save(5, parts, {"batch": 5})

    assert folders(bucket) == ["ba00000001", "ba00000002", "ba00000003.1-0123abcd", "ba00000005"]
    assert another().latest() == (url, [])


@pytest.mark.parametrize("change", ["parts", "facts", "damage"])
def test_one_that_differs_or_is_damaged_is_replaced(change, bucket, three, another, parts):
    """The newer one has a name of its own; no moment is without one."""
    facts = {"batch": "other" if change == "facts" else 3}
    if change == "parts":
        parts["model"]["0.bias"] += 1
    if change == "damage":
        bucket.change(f"{FOLDER}/ba00000003/model.safetensors")
    writer = another() if change == "damage" else three

    url = writer.save(3, parts, facts)

    assert url.name.startswith("ba00000003.1-")
    assert folders(bucket) == ["ba00000001", "ba00000002", url.name]
    assert another().latest() == (url, [])
    assert read_checkpoint(another().download(url)).facts == facts
    again = writer.save(3, parts, {"batch": "again"})
    assert again.name.startswith("ba00000003.2-")
    assert folders(bucket) == ["ba00000001", "ba00000002", again.name]


def test_names_say_the_batch():
    """And how many checkpoints one has replaced."""
    names = ["ba00000003", "ba00000003.1-0123abcd", "ba1000000000", "ba3", "ba00000003.1"]

    assert [key_of(name) for name in names] == [(3, 0), (3, 1), (10**9, 0), None, None]


# Removing


@pytest.mark.parametrize(
    ("keep", "left"),
    [([3], [3]), ([1, 3, 9], [1, 3]), ([], [3]), ([9], [3]), ([1, 2, 3], [1, 2, 3])],
)
def test_all_but_those_to_keep_are_removed(keep, left, bucket, three):
    """But one always stays: the newest, if none is to be kept."""
    removed = three.prune(keep)

    assert folders(bucket) == [f"ba0000000{batch}" for batch in left]
    assert sorted(one.name for one in removed) == sorted(
        f"ba0000000{batch}" for batch in {1, 2, 3} - set(left)
    )


def test_the_manifest_goes_first(bucket, three):
    """What is half removed is not a checkpoint."""
    bucket.done.clear()

    three.prune([2, 3])

    removed = [path.rpartition("/")[2] for name, path in bucket.done if name == "rm_file"]
    assert removed[0] == "manifest.json"
    assert len(removed) > 2


def test_the_last_one_that_verifies_is_never_removed(bucket, three, another):
    """Those that were to be kept may be damaged; who didn't write them looks."""
    bucket.change(f"{FOLDER}/ba00000003/model.safetensors")
    bucket.change(f"{FOLDER}/ba00000002/model.safetensors")

    another().prune([3])

    assert folders(bucket) == ["ba00000001", "ba00000003"]


def test_where_none_verifies_none_is_removed(bucket, three, another):
    """Somebody may be able to rescue something."""
    for batch in (1, 2, 3):
        bucket.change(f"{FOLDER}/ba0000000{batch}/model.safetensors")

    assert another().prune([3]) == []
    assert len(folders(bucket)) == 3


def test_what_was_uploaded_is_not_downloaded_to_prune(bucket, three):
    """Each save would be followed by a download otherwise."""
    bucket.done.clear()

    three.prune([3])

    assert downloads(bucket) == []


# Failures


@pytest.mark.parametrize("operation", ["ls", "open", "put_file", "pipe_file", "rm_file"])
def test_what_fails_once_is_tried_again(operation, bucket, three, another, parts):
    """Networks do; nobody sees it."""
    other = another()
    failures = iter([OSError("the connection was reset"), TimeoutError()])

    def fail(name, path):
        if name == operation and (error := next(failures, None)):
            raise error

    bucket.fail = fail
    other.save(4, parts, {})
    other.prune([4])

    assert (other.latest()[0].name, folders(bucket)) == ("ba00000004", ["ba00000004"])
    assert bucket.pauses_s == [1.0, 4.0]
    other.save(5, parts, {})
    three.download(three.folder / "ba00000005")


@pytest.mark.parametrize(
    ("error", "num_pauses"),
    [
        (OSError("the connection was reset"), 3),
        (PermissionError(errno.EACCES, "Permission denied"), 0),
        (OSError(errno.ENOSPC, "No space left on device"), 0),
        (FileNotFoundError(errno.ENOENT, "The specified bucket does not exist"), 0),
        (RuntimeError("no credentials"), 0),
    ],
)
def test_what_goes_on_failing_is_told(error, num_pauses, bucket, three, parts):
    """With the object and the reason; nothing of it stays, and what was there does."""

    def fail(name, path):
        if name == "put_file" and path.endswith("optimizers.json"):
            raise error

    bucket.fail = fail
    with pytest.raises(CheckpointError, match=r"ba00000004/optimizers.json can't be uploaded: "):
        three.save(4, parts, {})

    assert len(bucket.pauses_s) == num_pauses
    assert folders(bucket) == ["ba00000001", "ba00000002", "ba00000003"]
    assert three.latest()[0].name == "ba00000003"


@pytest.mark.parametrize("operation", ["ls", "open"])
def test_a_store_that_fails_is_not_an_empty_one(operation, bucket, three, another):
    """Nor one of damaged checkpoints: the run would begin again, or earlier."""

    def fail(name, path):
        if name == operation:
            raise OSError("the connection was reset")

    bucket.fail = fail

    with pytest.raises(CheckpointError, match="the connection was reset"):
        another().latest()


def test_a_download_that_ends_early_is_tried_again(bucket, three, another):
    """A connection that ends isn't damage."""
    path = f"{FOLDER}/ba00000003/model.safetensors"
    whole = bucket.kind.store[path].getvalue()
    calls = []

    def fail(name, about):
        if name == "open" and about == path:
            calls.append(about)
            bucket.kind.store[path].seek(0)
            bucket.kind.store[path].truncate(100)
            if len(calls) > 1:
                bucket.kind.store[path].write(whole)

    bucket.fail = fail

    assert another().latest()[0].name == "ba00000003"
    assert len(calls) == 2


def test_a_full_disk_is_told_of(three, another, monkeypatch):
    """A download needs space, too."""

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("eventloop.files.disk.write", fail)

    with pytest.raises(CheckpointError, match=r"downloaded to '.*': No space left on device"):
        another().latest()
    monkeypatch.setattr("eventloop.files.disk.make_folder", fail)
    with pytest.raises(CheckpointError, match=r"can't be copied to '.*': No space left on device"):
        another().latest()
