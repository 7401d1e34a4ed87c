"""Kills between any two operations on files: at every moment a verified checkpoint is there."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from eventloop.checkpoint import retention
from eventloop.checkpoint.checkpoint_files import read_checkpoint
from eventloop.checkpoint.store import Store
from eventloop.checkpoint.verifying import name_of
from eventloop.files import disk

OPERATIONS = (
    *("make_folder", "create", "write", "sync", "sync_folder"),
    *("rename", "remove_file", "remove_empty"),
)


class Killed(BaseException):
    """Stands for the end of the process."""


class Process:
    """The operations of a process that is killed before one of them; none after it has any effect.

    Args:
        kill_at: how many operations it may do; the one that it is killed in has half an effect, if
            it writes.
        power_fails: whether all that wasn't synced is lost, too.
    """

    def __init__(self, monkeypatch, kill_at=10**9, *, power_fails=False):
        self.left = kill_at
        self.power_fails = power_fails
        self.done = []
        self.unsynced = {}
        for name in OPERATIONS:
            monkeypatch.setattr(disk, name, self.operation(name, getattr(disk, name)))

    def operation(self, name, function):
        def operate(*arguments):
            self.left -= 1
            if self.left == -1:
                if name == "write":
                    function(arguments[0], arguments[1][: len(arguments[1]) // 2])
                self.end()
            if self.left < 0:
                raise Killed
            result = function(*arguments)
            self.note(name, arguments, result)
            return result

        return operate

    def note(self, name, arguments, result):
        self.done.append((name, *(one.name for one in arguments if hasattr(one, "name"))))
        if name == "create":
            self.unsynced[result] = os.dup(result)
        if name == "sync":
            os.close(self.unsynced.pop(arguments[0]))

    def end(self):
        for copy in self.unsynced.values():
            if self.power_fails:
                os.ftruncate(copy, 0)
            os.close(copy)
        retention._ours.clear()  # the next process may even have the same id


PARTS = {"model": {"w": torch.arange(4.0)}, "clock": {"batch": 1}}


def other_parts():
    return PARTS | {"clock": {"batch": 2}}


def start(store):
    """Makes what is there before: two whole checkpoints."""
    store.save(1, PARTS, {"of": "start"})
    store.save(2, PARTS, {"of": "start"})


def leave_things(store):
    """Makes what a killed save and a killed removal leave, under this process's id."""
    start(store)
    with retention.new_id() as one:
        for name in ("ba00000001", "ba00000002"):
            shutil.copytree(store.folder / name, store.folder / f".tmp-{name}-{one}")


def leave_replaced(store):
    """Makes what a kill between two renames leaves: the only checkpoint under another name."""
    store.save(2, PARTS, {"of": "start"})
    with retention.new_id() as one:
        (store.folder / name_of(2)).rename(store.folder / f".was-{name_of(2)}-{one}")


def leave_both(store):
    """Makes what a kill leaves whose replacement turned out to be damaged."""
    leave_replaced(store)
    (replaced,) = store.folder.iterdir()
    shutil.copytree(replaced, store.folder / name_of(2))
    (store.folder / name_of(2) / "model.safetensors").write_bytes(b"")


def damaged(store):
    """Makes three checkpoints of which the newest is damaged."""
    store.save(0, PARTS, {})
    start(store)
    (store.folder / name_of(2) / "model.safetensors").write_bytes(b"")


SCENARIOS = {
    "save another": (start, lambda store: store.save(3, PARTS, {})),
    "save the same": (start, lambda store: store.save(2, PARTS, {"of": "start"})),
    "replace": (start, lambda store: store.save(2, other_parts(), {})),
    "replace the only one": (
        lambda store: store.save(2, PARTS, {"of": "start"}),
        lambda store: store.save(2, other_parts(), {}),
    ),
    "replace what is damaged": (damaged, lambda store: store.save(2, other_parts(), {})),
    "prune": (start, lambda store: store.prune([2])),
    "prune to nothing": (start, lambda store: store.prune([])),
    "prune what is damaged": (damaged, lambda store: store.prune([2])),
    "clear": (leave_things, lambda store: store.clear()),
    "clear what was replaced": (leave_replaced, lambda store: store.clear()),
    "clear what wasn't": (leave_both, lambda store: store.clear()),
    "save after a kill": (leave_replaced, lambda store: store.save(2, other_parts(), {})),
}


def run_until_killed(before, call, kill_at, folder, *, power_fails):
    """Does a call that is killed at an operation; gives the store as the next process finds it."""
    store = Store(folder)
    before(store)
    with pytest.MonkeyPatch.context() as patch:
        process = Process(patch, kill_at, power_fails=power_fails)
        try:
            call(store)
        except Killed:
            return store, True
        return store, process.left < 0  # killed in what may fail


def moments(before, call, tmp_path, *, power_fails=False):
    """Yields a store for each moment at which the call may be killed, and one where it isn't."""
    for kill_at in range(1000):
        folder = tmp_path / str(kill_at)
        store, was_killed = run_until_killed(before, call, kill_at, folder, power_fails=power_fails)
        yield store
        if not was_killed:
            return
    raise AssertionError("it never ended")


@pytest.mark.sampled(20)
@pytest.mark.parametrize("power_fails", [False, True])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_verified_checkpoint_is_there_at_every_moment(scenario, power_fails, tmp_path):
    """A process may be killed between any two operations, and in the middle of a write."""
    before, call = SCENARIOS[scenario]
    num_moments = 0
    for store in moments(before, call, tmp_path, power_fails=power_fails):
        num_moments += 1

        latest, refused = store.latest()

        assert latest is not None
        assert torch.equal(read_checkpoint(latest).parts["model"]["w"], torch.arange(4.0))
        # Nothing half written or half removed counts as a checkpoint.
        assert bool(refused) <= (before in (damaged, leave_both))
        # What comes next cleans up and goes on.
        path = store.save(4, PARTS, {})
        assert store.latest() == (path, [])
        assert all(one.name.startswith("ba") for one in store.folder.iterdir())
    assert num_moments > 2


def test_the_newest_is_never_lost(tmp_path):
    """A replacement gives the one before or the new one, never an older one."""
    before, call = SCENARIOS["replace"]
    found = [store.found(digests=True)[0] for store in moments(before, call, tmp_path)]

    assert {one.batch for one in found} == {2}
    assert [one.facts for one in found] == sorted(
        (one.facts for one in found), key=len, reverse=True
    )
    assert found[0].facts == {"of": "start"}
    assert found[-1].facts == {}


def test_a_first_save_leaves_all_or_nothing(tmp_path):
    """Folders above it are made, too."""
    moment = list(moments(lambda store: None, lambda store: store.save(1, PARTS, {}), tmp_path))
    whole = [len(store.found(digests=True)) for store in moment]

    assert whole == sorted(whole)
    assert (whole[0], whole[-1]) == (0, 1)
    assert all(not one.reason for store in moment for one in store.found(digests=True))


def remove_first(self, temporary, target):
    shutil.rmtree(target, ignore_errors=True)
    disk.rename(temporary, target)


def test_a_moment_without_a_checkpoint_would_be_found(tmp_path, monkeypatch):
    """The negative control: to remove the old one before the new one has its name."""
    monkeypatch.setattr(Store, "_put_in_place", remove_first)
    before, call = SCENARIOS["replace the only one"]

    assert None in [store.latest()[0] for store in moments(before, call, tmp_path)]


def test_a_file_that_is_not_synced_would_be_found(tmp_path, monkeypatch):
    """The negative control of the power failure."""
    monkeypatch.setattr(disk.NewFile, "__exit__", lambda self, *_: os.close(self._descriptor))
    before, call = SCENARIOS["save another"]

    def is_whole(**given):
        path = tmp_path / str(given)
        return all(not store.latest()[1] for store in moments(before, call, path, **given))

    assert is_whole(power_fails=False)
    assert not is_whole(power_fails=True)


def test_names_are_synced_in_the_order_that_matters(tmp_path, monkeypatch):
    """Of files before the manifest, of the folder before its new name, of that before the old goes."""
    store = Store(tmp_path)
    store.save(2, PARTS, {})
    process = Process(monkeypatch)

    store.save(2, other_parts(), {})

    names = [(name, *(one.split("-")[0] for one in arguments)) for name, *arguments in process.done]
    file = ["create", "write", "sync"]
    assert [one for one in names if one[0] in ("sync_folder", "rename")] == [
        ("sync_folder", ".tmp"),
        ("rename", "ba00000002", ".was"),
        ("rename", ".tmp", "ba00000002"),
        ("sync_folder", tmp_path.name.split("-")[0]),
        ("rename", ".was", ".tmp"),
        ("sync_folder", tmp_path.name.split("-")[0]),
    ]
    creates = [one[1] for one in names if one[0] == "create"]
    assert creates == ["model.safetensors", "clock.json", "manifest.json"]
    kinds = [one[0] for one in names]
    last_sync = len(kinds) - 1 - kinds[::-1].index("sync")
    assert kinds[: last_sync + 2] == [
        "make_folder",
        "create",
        *["write"] * 2,
        "sync",
        *file,
        *file,
        "sync_folder",
    ]
    assert kinds.index("remove_file") > len(kinds) - 5
