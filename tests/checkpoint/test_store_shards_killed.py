"""A rank that is killed at any operation on files while several save together: one checkpoint verifies.

The ranks are forks of this process, which write, rename and prune for real; what trains is in the tests of
eventloop-fsdp. At a URL each rank writes into a folder of its own, and uploads what it has.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
import traceback
from multiprocessing import Pipe

import pytest
import torch

from eventloop.checkpoint.checkpoint_files import read_checkpoint
from eventloop.checkpoint.manifest import MANIFEST
from eventloop.checkpoint.part_differences import differences
from eventloop.checkpoint.store import Store
from eventloop.distributed.checkpoint_crew import CrewOfRanks
from eventloop.errors import CheckpointError
from eventloop.files import disk
from eventloop.training.tensor_slices import TensorSlice
from eventloop.urls import Url
from eventloop_remote import RemoteCheckpoints, RemoteFolder

CHANGES = ("make_folder", "create", "write", "sync", "sync_folder", "rename", "remove_file", "remove_empty")  # fmt: skip
KILLED, FAILED = 9, 1


class Forks(CrewOfRanks):
    """A crew of processes, of which rank 0 has a pipe to each."""

    def __init__(self, rank, pipes):
        self.rank, self.world_size = rank, len(pipes)
        self._pipes = [ours for ours, _ in pipes] if rank == 0 else [pipes[rank][1]]
        for other, (ours, theirs) in enumerate(pipes):
            for end, owner in ((ours, 0), (theirs, other)):
                if owner != rank:
                    end.close()  # so that the end of a process is seen

    def gather(self, value):
        if self.rank:
            self._pipes[0].send(value)
            return []
        return [value, *(pipe.recv() for pipe in self._pipes[1:])]

    def first(self, value):
        if self.rank:
            return self._pipes[0].recv()
        for pipe in self._pipes[1:]:
            pipe.send(value)
        return value


def parts_of(rank, world_size, batch):
    """Returns the share of a rank: rows of tensors, of one of which half of the ranks have a copy alone."""
    whole = torch.arange(8.0 * world_size).view(2 * world_size, 4) + batch
    part = TensorSlice(whole[2 * rank : 2 * rank + 2], tuple(whole.shape), (2 * rank, 0))
    rows, is_copy = slice(4 * rank, 4 * rank + 4), rank >= world_size // 2
    held, start = (whole[:0], 0) if is_copy else (whole[rows], 4 * rank)
    copied = TensorSlice(held, tuple(whole.shape), (start, 0))
    of_all = {"training": {"batch": batch}} if rank == 0 else {}
    nests = {"model": {"w": part}, "optimizers": {"adam": {0: copied, "lr": 0.1}}}
    return nests | {f"rank{rank}": {"a": rank}} | of_all


class Shelf(RemoteFolder):
    """A storage in a folder, in which a kill can leave half a file."""

    def __init__(self, path):
        self.path = path

    def names(self):
        return [one.name for one in self.path.iterdir()] if self.path.exists() else []

    def sizes(self, name):
        folder = self.path / name
        return {one.name: one.stat().st_size for one in folder.iterdir()} if folder.exists() else {}

    def read(self, name, file, num_bytes):
        return (self.path / name / file).read_bytes()[:num_bytes]

    def upload(self, name, file, source):
        disk.make_folders(self.path / name)
        target = self.path / name / file
        part = target.with_suffix(".part") if file == MANIFEST else target
        with disk.NewFile(part) as new:
            new.write(source.read_bytes())
        if part != target:
            disk.rename(part, target)

    def remove(self, name):
        if (self.path / name / MANIFEST).exists():
            disk.remove_file(self.path / name / MANIFEST)
        disk.remove_tree(self.path / name)


def store_in(folder, rank, is_remote):
    """Returns the checkpoints in a folder: of a disk that ranks share, or of a storage."""
    if not is_remote:
        return Store(folder)
    return RemoteCheckpoints(
        Url("shelf://run/checkpoints"), Shelf(folder), folder.parent / f"{folder.name}-{rank}"
    )


def save(folder, batch, crew, is_remote):
    """Saves as a run does that keeps the newest alone."""
    store = store_in(folder, crew.rank, is_remote)
    path = store.save(batch, parts_of(crew.rank, crew.world_size, batch), {"finite": True}, crew)
    if crew.rank == 0:
        store.prune({batch}, path)


def die_at(kill_at, whom):
    """Ends the process, or all, where it begins its so many-th change of the disk, or halfway through it."""
    num_left = kill_at

    def dying(name, function):
        def operate(*arguments, **given):
            nonlocal num_left
            num_left -= 1
            if num_left < 0:
                if name == "write":
                    function(arguments[0], arguments[1][: len(arguments[1]) // 2])
                if whom == "all":
                    os.killpg(0, signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **given)

        return operate

    for name in CHANGES:
        setattr(disk, name, dying(name, getattr(disk, name)))


def together(folder, batch, world_size, is_remote, dies=None, kill_at=0, whom="one"):
    """Saves in forks; gives how each ended."""
    pipes = [Pipe() for _ in range(world_size)]
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if not pid:
            os.setpgid(0, pids[0] if pids else 0)
            status = FAILED
            try:
                if rank == dies:
                    die_at(kill_at, whom)
                save(folder, batch, Forks(rank, pipes), is_remote)
                status = 0
            except (EOFError, OSError, CheckpointError):
                pass  # another one is gone
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                status = 70
            os._exit(status)
        os.setpgid(pid, pids[0] if pids else pid)
        pids.append(pid)
    for ours, theirs in pipes:
        ours.close()
        theirs.close()
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def killed_everywhere(tmp_path, world_size, is_remote, dies, whom):
    """Kills a rank at each change of the disk in turn; gives how many there were."""
    begun = tmp_path / "begun"
    assert together(begun, 1, world_size, is_remote) == [0] * world_size
    for kill_at in itertools.count():
        folder = tmp_path / str(kill_at)
        shutil.copytree(begun, folder)
        ended = together(folder, 2, world_size, is_remote, dies, kill_at, whom)
        assert 70 not in ended
        if ended[dies] != -KILLED:
            assert ended == [0] * world_size
            return kill_at

        store = store_in(folder, "later", is_remote)
        latest, refused = store.latest()
        assert latest is not None, f"{kill_at}: {refused}"
        assert refused == []
        batch = int(latest.name.partition("ba")[2][:8])
        copy = store.download(latest) if is_remote else latest
        assert read_checkpoint(copy).parts["training"] == {"batch": batch}

        half = {one.name for one in folder.iterdir()} - {latest.name}
        store.clear(alone=True)
        assert together(folder, 2, world_size, is_remote) == [0] * world_size
        (last,) = folder.iterdir()
        assert last.name.startswith("ba00000002")
        assert last.name not in half  # a rank that was cut off may go on uploading there
        expected = torch.arange(8.0 * world_size).view(-1, 4) + 2
        parts = read_checkpoint(last).parts
        assert list(differences(parts["model"], {"w": expected})) == []
        assert list(differences(parts["optimizers"]["adam"][0], expected)) == []
        shares = [folder.parent / f"{folder.name}-{rank}" for rank in range(world_size)]
        assert [one for share in shares if is_remote for one in share.iterdir()] == []
        for one in tmp_path.glob(f"{kill_at}*"):
            shutil.rmtree(one)
    raise AssertionError


@pytest.mark.nightly
@pytest.mark.parametrize("is_remote", [False, True], ids=["on a disk", "at a URL"])
@pytest.mark.parametrize("dies", [0, 1])
def test_one_of_two_ranks_is_killed_at_each_operation(tmp_path, dies, is_remote):
    """What the other one does then is part of it: it hears of the end, and clears up."""
    num_killed = killed_everywhere(tmp_path, 2, is_remote, dies, "one")

    assert num_killed >= (25 if dies == 0 else 8)


@pytest.mark.nightly
@pytest.mark.parametrize("is_remote", [False, True], ids=["on a disk", "at a URL"])
@pytest.mark.parametrize("dies", range(4))
@pytest.mark.parametrize("whom", ["one", "all"])
def test_each_of_four_ranks_is_killed_at_each_operation(tmp_path, dies, whom, is_remote):
    """Alone, or with all others at that moment, as when a machine goes."""
    assert killed_everywhere(tmp_path, 4, is_remote, dies, whom) >= (25 if dies == 0 else 8)
