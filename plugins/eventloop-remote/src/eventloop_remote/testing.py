"""Checks the contract of a storage by saving, replacing and removing small checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from eventloop.storage import MANIFEST, RunLock, Url, batch_in

if TYPE_CHECKING:
    from eventloop_remote.checkpoints import RemoteCheckpoints
    from eventloop_remote.moving import RemoteFolder, RemoteStorage

_PARTS = {"model": {"weight": torch.arange(6.0)}, "clock": {"batch": 1}}
_OTHER = {"model": {"weight": torch.ones(6)}, "clock": {"batch": 1}}


def check_storage(storage: RemoteStorage, url: str, folder: Path) -> None:
    """Checks that a storage meets the contracts of `RemoteFolder` and `RemoteStorage`.

    Args:
        storage: the target of its entry point.
        url: URL of a run, which must not exist yet.
        folder: an empty local folder.

    Raises:
        AssertionError: the contract is violated; the message says how.
    """
    run = Url(url)
    checkpoints_url = run / "checkpoints"
    _check_empty(storage.folder(checkpoints_url))
    checkpoints = storage.checkpoints(checkpoints_url, folder / "one")
    # The second object acts as another machine: everything it needs must be in the storage.
    second_checkpoints = storage.checkpoints(checkpoints_url, folder / "other")
    for batch in (1, 2):
        checkpoints.save(batch, _PARTS, {"batch": batch})
    _check_files(storage.folder(checkpoints_url), folder / "one" / "ba00000002")
    _require(
        second_checkpoints.latest()
        == (checkpoints.folder / second_checkpoints.found()[0].path.name, []),
        "it verifies again",
    )
    _check_half_upload(storage.folder(checkpoints_url), folder / "one" / "ba00000002")
    checkpoints.save(2, _OTHER, {"batch": "other"})
    _require(
        _facts(second_checkpoints) == [{"batch": "other"}, {"batch": 1}],
        "a checkpoint can be replaced",
    )
    checkpoints.prune([2])
    _require(_facts(second_checkpoints) == [{"batch": "other"}], "a checkpoint can be removed")
    _check_lock(storage, run, folder / "one")


def _check_empty(remote: RemoteFolder) -> None:
    _require(list(remote.names()) == [], "`names` is empty where nothing is")
    _require(dict(remote.sizes("ba00000001")) == {}, "`sizes` is empty where nothing is")
    try:
        remote.read("ba00000001", MANIFEST, 10)
    except FileNotFoundError:
        return
    raise AssertionError("`read` of a missing file must raise FileNotFoundError")


def _check_files(remote: RemoteFolder, copy: Path) -> None:
    names = sorted(remote.names())
    _require(
        [batch_in(name) for name in names] == [1, 2], f"`names` has what is there, not {names}"
    )
    contents = {path.name: path.read_bytes() for path in copy.iterdir()}
    sizes = {file: len(data) for file, data in contents.items()}
    _require(dict(remote.sizes(names[1])) == sizes, "`sizes` are those of the files")
    for file, data in contents.items():
        for num_bytes in (10, len(data), len(data) + 10):
            data_read = remote.read(names[1], file, num_bytes)
            _require(data_read == data[:num_bytes], f"`read` returns {num_bytes} bytes at most")


def _check_half_upload(remote: RemoteFolder, copy: Path) -> None:
    """Uploads one file of two, like a process that is killed, and removes it."""
    name = "ba00000009.1-00000000"
    file = "model.safetensors"
    remote.upload(name, file, copy / file)
    _require(name in remote.names(), "`names` has what is half uploaded, too")
    try:
        remote.upload(name, MANIFEST, copy / "nosuch.json")
    except Exception:  # noqa: BLE001  any error will do, as long as it isn't silent
        _require(list(remote.sizes(name)) == [file], "a file is there when it was uploaded")
        remote.remove(name)
        _require(name not in remote.names(), "what is half uploaded can be removed")
        return
    raise AssertionError("`upload` of a file that isn't there must raise")


def _check_lock(storage: RemoteStorage, run: Url, folder: Path) -> None:
    for _ in range(2):  # the second time shows that it was released
        lock = storage.lock(run, RunLock(folder))
        lock.acquire()
        lock.acquire()
        lock.require()
        lock.release()


def _facts(checkpoints: RemoteCheckpoints) -> list[object]:
    return [checkpoint.facts for checkpoint in checkpoints.found(digests=True)]


def _require(holds: bool, requirement: str) -> None:
    if not holds:
        raise AssertionError(f"a storage must see to it that {requirement}")
