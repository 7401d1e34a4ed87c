"""A run's folder: its name, and its files, which are opened safely even if it isn't trusted.

A folder from an archive, or one that others can write to, can contain a link where a run expects a
file: writing through it would change a file elsewhere, and opening a pipe would block forever. The
core and plugins open all files in a run's folder by this module.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shlex
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eventloop.errors import RunFolderError
from eventloop.files import disk
from eventloop.files.disk import CorruptFileError
from eventloop.fixes import as_set

if TYPE_CHECKING:
    from eventloop.urls import Url

# On Windows a folder is looked at, and what is in it is opened by its path.
_HAS_DIR_FD = {os.open, os.stat, os.mkdir, os.unlink, os.rename} <= os.supports_dir_fd
_ODD = re.compile(r"[^A-Za-z0-9_.-]+")
_JUNCTION = 0xA0000003  # `stat.IO_REPARSE_TAG_MOUNT_POINT`, which only Windows has
_OTHERS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}


def append_whole(descriptor: int, data: bytes) -> None:
    """Appends to a file; if the disk refuses a part, nothing is appended.

    Args:
        descriptor: as `RunFolder.append_to` returns it.

    Raises:
        OSError: the disk is full or fails, or the file was deleted after it was opened.
    """
    before = os.fstat(descriptor)
    if not before.st_nlink and stat.S_ISREG(before.st_mode):
        raise FileNotFoundError(errno.ENOENT, "it was deleted while the run wrote into it")
    try:
        disk.write(descriptor, memoryview(data))
    except OSError:
        if before.st_size < os.fstat(descriptor).st_size:
            os.ftruncate(descriptor, before.st_size)
        raise


class RunFolder:
    """Opens the files of a run's folder by name: only regular files, following no links.

    A name is relative to the folder and can contain folders: `plots/loss.png`. The run's folder and
    its parents are chosen by the user and can be links; nothing below it can be.

    The type of a file is checked before and after opening it. A file that is changed in place must
    have no hard links, as their targets would change, too.

    Every method raises `RunFolderError` for a link or anything but a regular file, and `OSError` if
    the disk or permissions refuse.

    Args:
        path: of the run, `state.run_dir`; created with the first file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def read(self, name: str, max_bytes: int) -> bytes:
        """Returns the first bytes of a file."""
        with self._around(name) as (inside, last):
            descriptor = inside.open(last, os.O_RDONLY)
        with os.fdopen(descriptor, "rb") as file:
            return file.read(max_bytes)

    def write(self, name: str, data: bytes) -> None:
        """Writes a file atomically."""
        with self._around(name, make=True) as (inside, last):
            inside.check(last)
            inside.check(disk.name_under_way(last))
            disk.replace_file(inside.named(last), data, inside.at)

    def append_to(self, name: str) -> int:
        """Opens a file to read and append, created if missing; the caller closes the descriptor."""
        with self._around(name, make=True) as (inside, last):
            return inside.open(last, os.O_RDWR | os.O_APPEND | os.O_CREAT, in_place=True)

    def create(self, name: str) -> int:
        """Creates a file for writing, or raises FileExistsError; the caller closes the descriptor."""
        with self._around(name, make=True) as (inside, last):
            return disk.create(inside.named(last), inside.at)

    @contextmanager
    def replacing(self, name: str) -> Iterator[Path]:
        """Yields a temporary path for a library that opens files itself; it is renamed afterwards.

        The path has an unpredictable name, in a folder that was checked.
        """
        with self._around(name, make=True) as (inside, last):
            inside.check(last)
            new = f".{os.urandom(8).hex()}-{last}"
            try:
                yield inside.path / new
                os.close(inside.open(new, os.O_RDONLY))
                disk.replace(inside.named(new), inside.named(last), inside.at)
            finally:
                with suppress(FileNotFoundError):
                    disk.remove_file(inside.named(new), inside.at)

    def remove(self, name: str) -> None:
        """Removes a file or a link, not the link's target; does nothing if it doesn't exist."""
        with suppress(FileNotFoundError), self._around(name) as (inside, last):
            disk.remove_file(inside.named(last), inside.at)

    def names(self, folder: str = "") -> list[str]:
        """Returns the names in the run's folder or a folder below it; none if it doesn't exist."""
        folders = folder.split("/") if folder else []
        with suppress(FileNotFoundError), self._entered(folders) as inside:
            with os.scandir(inside.path if inside.at is None else inside.at) as entries:
                return sorted(one.name for one in entries)
        return []

    def check(self, name: str, *, in_place: bool = False) -> None:
        """Checks what the other methods check, before there is anything to write.

        Args:
            in_place: whether the file will be changed, rather than read or replaced.
        """
        with suppress(FileNotFoundError), self._around(name) as (inside, last):
            inside.check(last, in_place=in_place)

    @contextmanager
    def _around(self, name: str, *, make: bool = False) -> Iterator[tuple[_Inside, str]]:
        """Opens the folder of a file; yields it with the file's base name."""
        *folders, last = name.split("/")
        with self._entered(folders, make=make) as inside:
            yield inside, _plain(last)

    @contextmanager
    def _entered(self, folders: Sequence[str], *, make: bool = False) -> Iterator[_Inside]:
        if make:
            disk.make_folders(self.path)
        inside = _Inside(self.path, disk.open_folder(self.path) if _HAS_DIR_FD else None)
        try:
            for folder in folders:
                inside = inside.enter(_plain(folder), make=make)
            yield inside
        finally:
            inside.close()


class _Inside(NamedTuple):
    """An open folder; `at` is its descriptor, None if the system can't open files relative to it."""

    path: Path
    at: int | None

    def named(self, name: str) -> str:
        """Returns a name for the functions of `os` that take `dir_fd`."""
        return str(self.path / name) if self.at is None else name

    def enter(self, name: str, *, make: bool) -> _Inside:
        """Opens a folder in this one and closes this one, except on an exception."""
        if make:
            with suppress(FileExistsError):
                disk.make_folder(self.named(name), self.at)
        there = os.stat(self.named(name), dir_fd=self.at, follow_symlinks=False)
        if _is_link(there) or not stat.S_ISDIR(there.st_mode):
            raise self._refused(name, there, "folder")
        descriptor = None if self.at is None else disk.open_folder(name, self.at)
        self.close()
        return _Inside(self.path / name, descriptor)

    def open(self, name: str, flags: int, *, in_place: bool = False) -> int:
        """Opens a regular file in this folder."""
        before = self.check(name, in_place=in_place)
        descriptor = os.open(self.named(name), flags | disk.CAREFUL, 0o666, dir_fd=self.at)
        try:
            now = os.fstat(descriptor)
            self._require_file(name, now, in_place)
            if before is not None and not disk.NO_FOLLOW and not os.path.samestat(before, now):
                raise self._refused(name, before, "file")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def check(self, name: str, *, in_place: bool = False) -> os.stat_result | None:
        """Refuses anything but a regular file, as opening a device can have effects."""
        try:
            there = os.stat(self.named(name), dir_fd=self.at, follow_symlinks=False)
        except FileNotFoundError:
            return None
        self._require_file(name, there, in_place)
        return there

    def close(self) -> None:
        """Closes the folder."""
        if self.at is not None:
            os.close(self.at)

    def _require_file(self, name: str, there: os.stat_result, in_place: bool) -> None:
        if _is_link(there) or not stat.S_ISREG(there.st_mode):
            raise self._refused(name, there, "file")
        if in_place and there.st_nlink > 1:
            path = shlex.quote(str(self.path / name))
            raise RunFolderError(
                f"{str(self.path / name)!r} has {there.st_nlink} names (hard links), and what a run "
                "appends would be in all of them",
                fix=f"give it a copy of its own, `cp {path} {path}.copy && mv {path}.copy {path}`, "
                "or give another folder, " + as_set(run_dir="FOLDER"),
            )

    def _refused(self, name: str, there: os.stat_result, wanted: str) -> RunFolderError:
        found = _OTHERS.get(stat.S_IFMT(there.st_mode), "a device")
        if _is_link(there):
            found = "a link to somewhere else"
        elif stat.S_ISREG(there.st_mode):
            found = "a file"
        path = self.path / name
        return RunFolderError(
            f"{str(path)!r} is {found}, where a run expects a {wanted} of its own",
            fix=f"move it away, `mv {shlex.quote(str(path))} {shlex.quote(f'{path}.old')}`, or give "
            "another folder, " + as_set(run_dir="FOLDER"),
        )


def read_json(run_dir: Path, name: str) -> dict[str, Any]:
    """Reads a JSON object from a file in a run's folder; {} if it can't be read."""
    try:
        found = disk.from_json(RunFolder(run_dir).read(name, disk.MAX_JSON_BYTES + 1))
        json.dumps([[[found]]], indent=2)  # takes more levels of the stack than reading does
    except (OSError, CorruptFileError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def check_folder(path: Path) -> None:
    """Raises RunFolderError if a path below a run's folder is a link, or not a folder."""
    with suppress(FileNotFoundError):
        _Inside(path.parent, None).enter(path.name, make=False)


def _plain(name: str) -> str:
    if name in ("", ".", "..") or Path(name).name != name:
        raise ValueError(f"{name!r} can't be a part of the name of a file in a run's folder")
    return name


def _is_link(there: os.stat_result) -> bool:
    """Whether it is a link, or a junction on Windows."""
    return stat.S_ISLNK(there.st_mode) or getattr(there, "st_reparse_tag", 0) == _JUNCTION


def why_no_folder(path: Path) -> str:
    """Returns why files can't be written into this folder, or ""; creates nothing."""
    path = path.absolute()
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # it is too long, or has a zero byte
        return getattr(error, "strerror", None) or str(error)
    there = next(one for one in (path, *path.parents) if os.path.lexists(one))
    if not there.is_dir():
        return f"{there} is not a folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"nothing may be written in {there}"
    return ""


def why_no_file(path: str | Path) -> str:
    """Returns why a file can't be written at this path, or ""; creates nothing."""
    path = Path(path)
    if path.is_dir():
        return "it is a folder"
    if path.exists() and not os.access(path, os.W_OK):
        return "it may not be overwritten"
    return why_no_folder(path.parent)


def new_run_dir(task_name: str) -> Path:
    """Returns the unique path of a new run folder: `runs/digits/20260131-120000-3fa9`."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return Path("runs", task_name, f"{stamp}-{os.urandom(2).hex()}")


def local_folder(url: Url) -> Path:
    """Returns the local folder for a run at a URL, always the same: `runs/s3/charlm-3fa9c2d1`."""
    digest = hashlib.sha256(str(url).encode()).hexdigest()[:8]
    name = _ODD.sub("-", url.name).strip("-.")[:60] or "run"
    return Path("runs", url.protocol, f"{name}-{digest}")
