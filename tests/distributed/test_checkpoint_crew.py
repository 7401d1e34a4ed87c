"""Ranks that save together: what fails on one alone is heard by all, or they would wait for it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from eventloop.checkpoint.store import Store
from eventloop.errors import CheckpointError
from eventloop.files import disk
from eventloop.training.tensor_slices import TensorSlice
from eventloop.urls import Url
from eventloop_remote import RemoteCheckpoints, RemoteFolder
from eventloop_testing.ranks import crew_of_threads


class Broken(RemoteFolder):
    """A storage that raises what it must not."""

    def names(self):
        raise RuntimeError("a mistake in it")

    sizes = read = upload = remove = names


def save_on_two(store_of):
    """Saves a tensor in slices on two ranks; gives what each raised."""
    crew = crew_of_threads(2)

    def save(rank):
        part = TensorSlice(torch.ones(1, 2), (2, 2), (rank, 0))
        parts = {"model": {"w": part}, f"rank{rank}": {"a": rank}}
        threading.current_thread().rank = rank
        try:
            store_of(rank).save(1, parts, {}, crew[rank])
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return [*pool.map(save, range(2))]


@pytest.mark.parametrize("full", [0, 1])
@pytest.mark.parametrize("is_remote", [False, True], ids=["on a disk", "at a URL"])
def test_too_little_space_on_one_rank_is_heard_by_all(tmp_path, monkeypatch, full, is_remote):
    """It is looked at before a byte is written, and before rank 0 says where to write."""

    def free(path):
        return 0 if threading.current_thread().rank == full else 2**40

    monkeypatch.setattr(disk, "num_free_bytes", free)

    def store_of(rank):
        if not is_remote:
            return Store(tmp_path / "checkpoints")
        return RemoteCheckpoints(Url("shelf://run/checkpoints"), Empty(), tmp_path / str(rank))

    raised = save_on_two(store_of)

    assert [type(one) for one in raised] == [CheckpointError, CheckpointError]
    assert all("there isn't enough space" in str(one) for one in raised)
    assert [*tmp_path.glob("*/*")] == []


class Empty(RemoteFolder):
    """A storage in which nothing is, and to which nothing may get here."""

    def names(self):
        return []

    def sizes(self, name):
        return {}

    read = upload = remove = None


def test_a_storage_that_breaks_on_rank_0_ends_the_save_of_all(tmp_path):
    """Before a save it is cleared by rank 0 alone."""
    url = Url("shelf://run/checkpoints")

    raised = save_on_two(lambda rank: RemoteCheckpoints(url, Broken(), tmp_path / str(rank)))

    assert isinstance(raised[0], RuntimeError)
    assert isinstance(raised[1], CheckpointError)
    assert "rank 0: a mistake in it" in str(raised[1])
