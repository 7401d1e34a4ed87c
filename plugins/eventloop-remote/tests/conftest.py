"""Stores in memory that fail when they are told to, and small checkpoints to put there."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from eventloop.checkpoint import retention
from eventloop.storage import Url
from eventloop_remote import RemoteCheckpoints
from eventloop_remote.folder import Folder
from eventloop_remote.objects import Objects


@pytest.fixture
def parts() -> dict[str, Any]:
    """Weights in a flat dict, and a nest of everything; the same each time."""
    generator = torch.Generator().manual_seed(0)
    return {
        "model": {"1.weight": torch.randn(64, 8, generator=generator), "0.bias": torch.ones(3)},
        "optimizers": {"adam": {0: {"step": torch.tensor(3.0)}, 1: (0.9, float("nan"), None)}},
        "clock": {"batch": 3, "generator": [2**64, -0.0, b"\0\xff", "ü\n"]},
    }


class Killed(BaseException):
    """Stands for the end of a process."""


class Bucket:
    """Stores under `flaky://`, which note what is asked of them, and fail when they are told to.

    Attributes:
        paths: those of all objects.
        done: each operation with the path it was about.
        fail: told each operation before it is done; raises, or not.
        is_torn: whether a write that fails leaves half of what was written.
        pauses_s: what was waited for before something was tried again.
    """

    Killed = Killed

    def __init__(self, *, has_folders: bool) -> None:
        self.done: list[tuple[str, str]] = []
        self.fail: Callable[[str, str], object] = lambda name, path: None
        self.is_torn = has_folders
        self.pauses_s: list[float] = []
        self.kind = _file_system(self, has_folders=has_folders)
        fsspec.register_implementation("flaky", self.kind, clobber=True)

    @property
    def paths(self) -> list[str]:
        return sorted(self.kind.store)

    def empty(self) -> None:
        """Removes everything."""
        self.kind.store.clear()
        self.kind.pseudo_dirs[:] = [""]

    def change(self, path: str) -> None:
        """Changes the last byte of an object."""
        data = self.kind.store[path].getvalue()
        self.kind.store[path] = MemoryFile(None, path, data[:-1] + bytes([data[-1] ^ 1]))

    def kill_at(self, number: int) -> None:
        """Lets the process end in an operation; nothing that it does afterwards has an effect."""
        left = itertools.count(number, -1)

        def fail(name: str, path: str) -> None:
            if next(left) <= 0:
                raise Killed

        self.fail = fail

    def revive(self) -> None:
        """Lets another process begin."""
        self.fail = lambda name, path: None
        retention._ours.clear()

    def objects(self, url: str) -> Objects:
        return Objects(Url(url), pause=self.pauses_s.append)

    def store(self, copies: Path, url: str = "flaky://run/checkpoints") -> RemoteCheckpoints:
        return RemoteCheckpoints(Url(url), Folder(self.objects(url)), copies)


def _file_system(bucket: Bucket, *, has_folders: bool) -> type[MemoryFileSystem]:
    """Makes a file system in memory that asks a bucket before each operation."""
    inside = threading.local()

    def asking(name: str) -> Callable[..., Any]:
        def operate(self: Any, path: str, *arguments: Any, **keywords: Any) -> Any:
            plain = getattr(MemoryFileSystem, name).__get__(self)
            if getattr(inside, "is_so", False):
                return plain(path, *arguments, **keywords)
            about = str(arguments[0] if name == "put_file" else path)
            try:
                inside.is_so = True
                try:
                    bucket.fail(name, about)
                except BaseException:
                    if bucket.is_torn and name in ("put_file", "pipe_file"):
                        data = arguments[0] if name == "pipe_file" else Path(path).read_bytes()
                        self.store[about] = MemoryFile(self, about, data[: len(data) // 2])
                    raise
                bucket.done.append((name, about))
                return plain(path, *arguments, **keywords)
            finally:
                inside.is_so = False

        return operate

    names = ("ls", "open", "put_file", "pipe_file", "rm_file", "mv", "rmdir")
    space: dict[str, Any] = {name: asking(name) for name in names}
    space |= {"store": {}, "pseudo_dirs": [""], "async_impl": not has_folders}
    if not has_folders:
        space["makedirs"] = space["mkdir"] = lambda self, path, **keywords: None
    space |= {"protocol": "flaky", "_strip_protocol": classmethod(_stripped)}
    return type("Flaky", (MemoryFileSystem,), space)


def _stripped(kind: Any, path: str) -> str:
    return MemoryFileSystem._strip_protocol(str(path).removeprefix("flaky://"))


@pytest.fixture(params=[True, False], ids=["folders", "objects"])
def bucket(request: pytest.FixtureRequest) -> Bucket:
    """An empty store with folders and torn writes, and one of objects."""
    return Bucket(has_folders=request.param)
