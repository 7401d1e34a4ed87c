"""Kills in any operation on a store: at every moment a verified checkpoint is there."""

from __future__ import annotations

import functools

import pytest
import torch

from eventloop.checkpoint.checkpoint_files import read_checkpoint
from eventloop_remote.folder import Folder

PARTS = {"model": {"w": torch.arange(4.0)}, "clock": {"batch": 1}}
OTHER = PARTS | {"clock": {"batch": 2}}
FOLDER = "/run/checkpoints"


def start(bucket, store):
    store.save(1, PARTS, {"of": "start"})
    store.save(2, PARTS, {"of": "start"})


def one(bucket, store):
    store.save(2, PARTS, {"of": "start"})


def damaged(bucket, store):
    """The newest is; the writer doesn't know."""
    store.save(0, PARTS, {})
    start(bucket, store)
    bucket.change(f"{FOLDER}/ba00000002/model.safetensors")


def half_replaced(bucket, store):
    """What a kill leaves that comes before the older one is removed."""
    one(bucket, store)
    kept = {path: bucket.kind.store[path] for path in bucket.paths}
    store.save(2, OTHER, {})
    bucket.kind.store |= kept


SCENARIOS = {
    "save another": (start, lambda store: store.save(3, PARTS, {})),
    "save the same": (start, lambda store: store.save(2, PARTS, {"of": "start"})),
    "replace": (start, lambda store: store.save(2, OTHER, {})),
    "replace the only one": (one, lambda store: store.save(2, OTHER, {})),
    "replace what is damaged": (damaged, lambda store: store.save(2, OTHER, {})),
    "prune": (start, lambda store: store.prune([2])),
    "prune to nothing": (start, lambda store: store.prune([])),
    "prune what is damaged": (damaged, lambda store: store.prune([2])),
    "clear": (half_replaced, lambda store: store.clear()),
    "save after a kill": (half_replaced, lambda store: store.save(2, OTHER, {"of": "new"})),
}


def moments(bucket, before, call, tmp_path):
    """Gives, for each moment at which the call may be killed, a process that comes later."""
    new = functools.partial(bucket.store, tmp_path / "copies")
    for number in range(200):
        bucket.empty()
        before(bucket, new())
        bucket.kill_at(number)
        was_killed = False
        try:
            call(new())
        except bucket.Killed:
            was_killed = True
        bucket.revive()
        yield bucket.store(tmp_path / "later")
        if not was_killed:
            return
    raise AssertionError("it never ended")


@pytest.mark.sampled(45)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_verified_checkpoint_is_there_at_every_moment(scenario, bucket, tmp_path):
    """Also one that writes may be killed in the middle of it."""
    before, call = SCENARIOS[scenario]
    num_moments = 0
    for store in moments(bucket, before, call, tmp_path):
        num_moments += 1

        latest, refused = store.latest()

        assert latest is not None
        assert torch.equal(
            read_checkpoint(store.download(latest)).parts["model"]["w"], torch.arange(4.0)
        )
        # Nothing half written or half removed counts as a checkpoint.
        assert bool(refused) <= (before is damaged)
        # What comes next cleans up and goes on.
        url = store.save(4, PARTS, {})
        assert store.latest() == (url, [])
        folders = {path.split("/")[3] for path in bucket.paths}
        assert folders == {one.path.name for one in store.found()}
        assert len({one.batch for one in store.found()}) == len(folders)
    assert num_moments > 2


def test_the_newest_is_never_lost(bucket, tmp_path):
    """A replacement gives the one before or the new one, never an older one."""
    before, call = SCENARIOS["replace"]
    found = [store.found(digests=True)[0] for store in moments(bucket, before, call, tmp_path)]

    assert {one.batch for one in found} == {2}
    assert [one.facts for one in found] == sorted(
        (one.facts for one in found), key=len, reverse=True
    )
    assert (found[0].facts, found[-1].facts) == ({"of": "start"}, {})


upload = Folder.upload


def remove_first(self, name, file, source):
    for other in self.names():
        if other != name:
            self.remove(other)
    upload(self, name, file, source)


def test_a_moment_without_a_checkpoint_would_be_found(bucket, tmp_path, monkeypatch):
    """The negative control: to remove the old one before the new one is there."""
    monkeypatch.setattr(Folder, "upload", remove_first)
    before, call = SCENARIOS["replace the only one"]

    assert None in [store.latest()[0] for store in moments(bucket, before, call, tmp_path)]


def manifest_first(self, name, file, source):
    for one in ("manifest.json", file):
        upload(self, name, one, source.parent / one)


def test_a_manifest_that_comes_too_early_would_be_found(bucket, tmp_path, monkeypatch):
    """The negative control of the order of files."""
    monkeypatch.setattr(Folder, "upload", manifest_first)
    before, call = SCENARIOS["save another"]

    assert any(store.latest()[1] for store in moments(bucket, before, call, tmp_path))
